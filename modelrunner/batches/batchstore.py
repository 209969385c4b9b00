"""Batches and their lines in SQLite. A line's answer is written once, and a batch ends once."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex

import msgspec

from modelrunner.batches.batch import Batch, BatchState, Line, parse
from modelrunner.batches.filestore import FileStore
from modelrunner.database import Database
from modelrunner.durable import make_folder, sweep_temporaries
from modelrunner.errors import Conflict, NotFound

SCHEMA = """
create table if not exists batches (id text primary key, created real, about blob);
create table if not exists lines (batch text, number integer, model text, custom_id text, body blob,
    status integer, answer blob, primary key (batch, number)) without rowid;
create index if not exists lines_by_status on lines (batch, status);
create index if not exists lines_that_wait on lines (model, batch, number) where status is null;
"""


class LineAnswer(msgspec.Struct, frozen=True):
    """The answer to a line: the status and the body that a client would have got."""

    line: Line
    status: int
    body: bytes
    request_id: str


class _KeptAnswer(msgspec.Struct, frozen=True):
    """An answer as its line keeps it."""

    request_id: str
    body: msgspec.Raw


class BatchStore:
    """Every method blocks. `clock` is the time of day in Unix seconds."""

    def __init__(self, database: Database, files: FileStore, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._files = files
        self._clock = clock

    def create(
        self, input_file: str, endpoint: str, window: str, seconds: float, metadata: dict[str, str], owner: str
    ) -> Batch:
        """Takes the lines of a file. A file with errors makes a failed batch. Raises `NotFound`, `OSError`."""
        self._files.get(input_file, owner)
        id, now = f"batch_{token_hex(12)}", self._clock()
        with self._files.open(input_file) as file:
            lines, errors = parse(file, endpoint, id)
        batch = Batch(id, owner, endpoint, input_file, window, BatchState.IN_PROGRESS, now, now + seconds, metadata)
        if errors:
            batch = msgspec.structs.replace(batch, status=BatchState.FAILED, errors=tuple(errors), ended=now)
        else:
            batch = msgspec.structs.replace(batch, total=len(lines))
        with self._database.transaction() as database:
            database.execute("insert into batches values (?, ?, ?)", (id, now, msgspec.json.encode(batch)))
            if not errors:
                rows = [(id, line.number, line.model, line.custom_id, line.body) for line in lines]
                database.executemany("insert into lines values (?, ?, ?, ?, ?, null, null)", rows)
        return batch

    def get(self, id: str, owner: str) -> Batch:
        """Raises `NotFound`, also for a batch of another key; the daemon's owner sees all."""
        with self._database.transaction() as database:
            row = database.execute("select about from batches where id = ?", (id,)).fetchone()
        found = msgspec.json.decode(row[0], type=Batch) if row else None
        if found is None or owner not in ("", found.owner):
            raise NotFound(f"there is no batch {id!r}: `modelrunner batch ls` shows them", param="batch_id")
        return self._counted(found)

    def all(self, owner: str) -> list[Batch]:
        """Returns the batches, the newest first."""
        with self._database.transaction() as database:
            rows = database.execute("select about from batches order by created desc, id").fetchall()
        found = [msgspec.json.decode(about, type=Batch) for (about,) in rows]
        return [self._counted(batch) for batch in found if owner in ("", batch.owner)]

    def cancel(self, id: str, owner: str) -> Batch:
        """Asks no further line. Raises `NotFound`, `Conflict` for a batch that is over."""
        batch, now = self.get(id, owner), self._clock()
        with self._database.transaction() as database:
            database.execute("begin immediate")  # the worker may end it at this moment
            [(about,)] = database.execute("select about from batches where id = ?", (id,))
            batch = msgspec.json.decode(about, type=Batch)
            if batch.status.is_final:
                raise Conflict(f"batch {id} is {batch.status}")
            batch = msgspec.structs.replace(batch, status=BatchState.CANCELLING, cancelling=now)
            database.execute("update batches set about = ? where id = ?", (msgspec.json.encode(batch), id))
        return self._counted(batch)

    def unfinished(self) -> list[Batch]:
        """Returns the batches that are not over, the oldest first. A batch has lines until it is over."""
        with self._database.transaction() as database:
            rows = database.execute(
                "select about from batches where exists (select 1 from lines where batch = id) order by created, id"
            ).fetchall()
        return [self._counted(msgspec.json.decode(about, type=Batch)) for (about,) in rows]

    def models(self) -> list[str]:
        """Returns the models of the lines that wait, ordered by their oldest line."""
        with self._database.transaction() as database:
            rows = database.execute(
                "select model from lines join batches on batches.id = lines.batch where status is null"
                " group by model order by min(created), min(number)"
            ).fetchall()
        return [model for (model,) in rows]

    def waiting(self, model: str, after: Mapping[str, int], limit: int) -> list[Line]:
        """Returns the next lines for a model that have no answer. `after` has the batches in their order, each with the
        number after which its lines are read."""
        found: list[Line] = []
        asked = (
            "select batch, number, custom_id, model, body from lines"
            " where status is null and model = ? and batch = ? and number > ? order by number limit ?"
        )
        with self._database.transaction() as database:
            for batch, number in after.items():
                rows = database.execute(asked, (model, batch, number, limit - len(found))).fetchall()
                found += [Line(*row) for row in rows]
        return found

    def record(self, answers: Iterable[LineAnswer]) -> None:
        """Writes answers; a line that has one keeps it."""
        rows = [
            (
                each.status,
                msgspec.json.encode(_KeptAnswer(each.request_id, msgspec.Raw(_json(each.body)))),
                line.batch,
                line.number,
            )
            for each in answers
            for line in (each.line,)
        ]
        with self._database.transaction() as database:
            database.executemany(
                "update lines set status = ?, answer = ? where batch = ? and number = ? and status is null", rows
            )

    def finish(self, batch: Batch) -> Batch:
        """Writes the files of a batch without lines to ask, and ends it. A kill in the middle is made good by the next
        call: the files get the same IDs again."""
        counted = self._counted(batch)
        if batch.status is BatchState.CANCELLING:
            end = BatchState.CANCELLED
        elif batch.status is BatchState.IN_PROGRESS and counted.completed + counted.failed < batch.total:
            end = BatchState.EXPIRED
        else:
            end = BatchState.COMPLETED
        digits, now = batch.id.removeprefix("batch_"), self._clock()
        made = {}
        for name, condition in (("output", "status = 200"), ("error", "status is null or status != 200")):
            lines = self._results(batch.id, condition, end)
            if (first := next(lines, None)) is not None:
                id = f"file-{digits}-{name}"
                self._files.write(id, _chain(first, lines), f"{batch.id}_{name}.jsonl", batch.owner)
                made[name] = id
        over = msgspec.structs.replace(
            counted,
            status=end,
            output_file=made.get("output"),
            error_file=made.get("error"),
            finalizing=now,
            ended=now,
            failed=batch.total - counted.completed,
        )
        with self._database.transaction() as database:
            database.execute("update batches set about = ? where id = ?", (msgspec.json.encode(over), batch.id))
            database.execute("delete from lines where batch = ?", (batch.id,))
        return over

    def _results(self, batch: str, condition: str, end: BatchState) -> Iterator[bytes]:
        with self._database.transaction() as database:
            asked = f"select number, custom_id, status, answer from lines where batch = ? and ({condition})"
            for number, custom_id, status, answer in database.execute(asked + " order by number", (batch,)):
                result = {"id": f"{batch}_{number}", "custom_id": custom_id, "response": None, "error": None}
                if status is None:
                    message = f"the batch was {end} before this line was asked"
                    result["error"] = {"code": f"batch_{end}", "message": message}
                else:
                    kept = msgspec.json.decode(answer, type=_KeptAnswer)
                    result["response"] = {"status_code": status, "request_id": kept.request_id, "body": kept.body}
                yield msgspec.json.encode(result) + b"\n"

    def _counted(self, batch: Batch) -> Batch:
        if batch.status.is_final:
            return batch
        with self._database.transaction() as database:
            [(completed, failed)] = database.execute(
                "select coalesce(sum(status = 200), 0), coalesce(sum(status != 200), 0) from lines"
                " where batch = ? and status is not null",
                (batch.id,),
            )
        return msgspec.structs.replace(batch, completed=completed, failed=failed)


def open_store(state: Path, files_limit: int) -> tuple[BatchStore, FileStore]:
    """Opens the stores of the daemon whose state lies in this folder. `files_limit` is as `FileStore.limit`."""
    from modelrunner.batches.filestore import SCHEMA as FILES

    database = Database(state / "batches.sqlite", SCHEMA + FILES)
    make_folder(folder := state / "files")
    sweep_temporaries(folder)
    files = FileStore(folder, database, files_limit)
    return BatchStore(database, files), files


def _json(body: bytes) -> bytes:
    """Returns the body if it is JSON, else its text as a JSON string."""
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.encode(body.decode("utf-8", "replace"))
    return body


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
