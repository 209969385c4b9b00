"""Batches in one folder, each in a file of its own, and the lines of those that are not over in SQLite. A line's answer
is written once, and a batch ends once.

The lines of a batch stand in its input file too. Those that SQLite has lost are read from there again, and asked again.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex

import msgspec

from modelrunner.batches.batch import Batch, BatchState, InputErrors, Line, LineError, parse
from modelrunner.batches.filestore import FileStore
from modelrunner.database import Database, answered
from modelrunner.durable import make_folder, sweep_temporaries, translated
from modelrunner.errors import Conflict, ModelRunnerError, NotFound
from modelrunner.jsonfile import JsonFile

SCHEMA = """
create table lines (batch text, number integer, model text, custom_id text, body blob, status integer, answer blob,
    primary key (batch, number));
create index lines_by_status on lines (batch, status);
create index lines_that_wait on lines (model, batch, number) where status is null;
"""
_INSERT = "insert {} into lines (batch, number, model, custom_id, body) values (?, ?, ?, ?, ?)"
log = logging.getLogger(__name__)


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

    def __init__(
        self, folder: Path, database: Database, files: FileStore, clock: Callable[[], float] = time.time
    ) -> None:
        """Reads the batches of the `folder`, and the lines that were lost. Raises `OSError`, `StorageFailed`."""
        self._folder = folder
        self._database = database
        self._files = files
        self._clock = clock
        self._changing = threading.Lock()
        make_folder(folder)
        sweep_temporaries(folder)
        loaded = (_file(folder, path.stem).load() for path in sorted(folder.glob("batch_*.json")))
        self._batches = {batch.id: batch for batch in loaded if batch is not None}
        if self._batches:
            self._bring_back_lines()

    def create(
        self, input_file: str, endpoint: str, window: str, seconds: float, metadata: dict[str, str], owner: str
    ) -> Batch:
        """Takes the lines of a file. A file with errors makes a failed batch. Raises `NotFound`, `InsufficientDisk`,
        `StorageFailed`."""
        id, now = f"batch_{token_hex(12)}", self._clock()
        batch = Batch(id, owner, endpoint, input_file, window, BatchState.IN_PROGRESS, now, now + seconds, metadata)
        with self._files.open(self._files.get(input_file, owner)) as file, answered("storing the batch", self._folder):
            try:
                with self._database.transaction() as database:
                    rows = map(_row, parse(file, endpoint, id))
                    batch = msgspec.structs.replace(
                        batch, total=database.executemany(_INSERT.format(""), rows).rowcount
                    )
            except InputErrors as error:
                batch = msgspec.structs.replace(batch, status=BatchState.FAILED, errors=error.errors, ended=now)
            self._keep(batch)
        return batch

    def get(self, id: str, owner: str) -> Batch:
        """Raises `NotFound`, also for a batch of another key; the daemon's owner sees all."""
        batch = self._batches.get(id)
        if batch is None or owner not in ("", batch.owner):
            raise NotFound(f"there is no batch {id!r}: `modelrunner batch ls` shows them", param="batch_id")
        return self._counted(batch)

    def all(self, owner: str) -> list[Batch]:
        """Returns the batches, the newest first."""
        newest = sorted(self._batches.copy().values(), key=lambda batch: (-batch.created, batch.id))
        return [self._counted(batch) for batch in newest if owner in ("", batch.owner)]

    def cancel(self, id: str, owner: str) -> Batch:
        """Asks no further line. Raises `NotFound`, `Conflict` for a batch that is over."""
        self.get(id, owner)
        now = self._clock()
        with answered("storing the batch", self._folder), self._changing:
            batch = self._batches[id]
            if batch.status.is_final:
                raise Conflict(f"batch {id} is {batch.status}")
            self._write(msgspec.structs.replace(batch, status=BatchState.CANCELLING, cancelling=now))
        return self._counted(self._batches[id])

    def unfinished(self) -> list[Batch]:
        """Returns the batches that are not over, the oldest first."""
        batches = [batch for batch in self._batches.copy().values() if not batch.status.is_final]
        return [self._counted(batch) for batch in sorted(batches, key=lambda batch: (batch.created, batch.id))]

    def postpone(self, seconds: float) -> None:
        """Moves the end of each batch that is not over. Raises `InsufficientDisk`, `StorageFailed`."""
        with translated("storing the batches", self._folder), self._changing:
            for batch in self._batches.copy().values():
                if not batch.status.is_final:
                    self._write(msgspec.structs.replace(batch, expires=batch.expires + seconds))

    def models(self) -> list[str]:
        """Returns the models of the lines that wait, ordered by their oldest line."""
        models: dict[str, None] = {}
        query = "select model from lines where status is null and batch = ? group by model order by min(number)"
        with self._database.transaction() as database:
            for batch in self.unfinished():
                models |= dict.fromkeys(model for (model,) in database.execute(query, (batch.id,)))
        return list(models)

    def waiting(self, model: str, after: Mapping[str, int], limit: int) -> list[Line]:
        """Returns the next lines for a model that have no answer. `after` has the batches in their order, each with the
        number after which its lines are read."""
        lines: list[Line] = []
        query = (
            "select batch, number, custom_id, model, body from lines"
            " where status is null and model = ? and batch = ? and number > ? order by number limit ?"
        )
        with self._database.transaction() as database:
            for batch, number in after.items():
                rows = database.execute(query, (model, batch, number, limit - len(lines))).fetchall()
                lines += [Line(*row) for row in rows]
        return lines

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
        call: the files get the same IDs again. A batch that has lost lines fails, with their number as its error."""
        counted, rows = self._counted(batch), self._count_rows(batch.id)
        if batch.status is BatchState.CANCELLING:
            end = BatchState.CANCELLED
        elif rows < batch.total:
            end = BatchState.FAILED
        elif counted.completed + counted.failed < batch.total:
            end = BatchState.EXPIRED
        else:
            end = BatchState.COMPLETED
        digits, now = batch.id.removeprefix("batch_"), self._clock()
        files = {}
        for name, condition in (("output", "status = 200"), ("error", "status is null or status != 200")):
            lines = self._results(batch.id, condition, end)
            if (first := next(lines, None)) is not None:
                id = f"file-{digits}-{name}"
                self._files.write(id, _chain(first, lines), f"{batch.id}_{name}.jsonl", batch.owner)
                files[name] = id
        over = msgspec.structs.replace(
            counted,
            status=end,
            errors=(_lost(batch.total - rows),) if rows < batch.total else (),
            output_file=files.get("output"),
            error_file=files.get("error"),
            finalizing=now,
            ended=now,
            failed=batch.total - counted.completed,
        )
        self._keep(over)
        with self._database.transaction() as database:
            database.execute("delete from lines where batch = ?", (batch.id,))
        return over

    def _results(self, batch: str, condition: str, end: BatchState) -> Iterator[bytes]:
        with self._database.transaction() as database:
            query = f"select number, custom_id, status, answer from lines where batch = ? and ({condition})"
            for number, custom_id, status, answer in database.execute(query + " order by number", (batch,)):
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
        with answered("reading the batch", self._folder), self._database.transaction() as database:
            [(completed, failed)] = database.execute(
                "select coalesce(sum(status = 200), 0), coalesce(sum(status != 200), 0) from lines"
                " where batch = ? and status is not null",
                (batch.id,),
            )
        return msgspec.structs.replace(batch, completed=completed, failed=failed)

    def _count_rows(self, batch: str) -> int:
        with self._database.transaction() as database:
            [(rows,)] = database.execute("select count(*) from lines where batch = ?", (batch,))
        return int(rows)

    def _keep(self, batch: Batch) -> None:
        with translated("storing the batch", self._folder), self._changing:
            self._write(batch)

    def _write(self, batch: Batch) -> None:
        _file(self._folder, batch.id).save(batch)
        self._batches[batch.id] = batch

    def _bring_back_lines(self) -> None:
        """Reads the lines again that were lost by damage, and removes those of batches that are over or not known."""
        with answered("reading the batches", self._folder):
            open = {batch.id: batch for batch in self._batches.values() if not batch.status.is_final}
            with self._database.transaction() as database:
                places = ", ".join("?" * len(open))
                database.execute(f"delete from lines where batch not in ({places})", tuple(open))
            for batch in open.values():
                if (missing := batch.total - self._count_rows(batch.id)) > 0:
                    log.error("%d lines of %s were lost: they are read from its input file again", missing, batch.id)
                    self._read_again(batch)

    def _read_again(self, batch: Batch) -> None:
        try:
            with (
                self._files.open(self._files.get(batch.input_file, batch.owner)) as file,
                self._database.transaction() as database,
            ):
                rows = map(_row, parse(file, batch.endpoint, batch.id))
                database.executemany(_INSERT.format("or ignore"), rows)
        except (ModelRunnerError, InputErrors, OSError) as error:
            log.error("the input file of %s cannot be read again: %s", batch.id, error)


def open_store(state: Path, files_limit: int) -> tuple[BatchStore, FileStore]:
    """Opens the stores of the daemon whose state lies in this folder. `files_limit` is as `FileStore.limit`."""
    files = FileStore(state / "files", files_limit)
    return BatchStore(state / "batches", Database(state / "batches.sqlite", SCHEMA), files), files


def _file(folder: Path, id: str) -> JsonFile[Batch]:
    return JsonFile(folder / f"{id}.json", Batch)


def _row(line: Line) -> tuple[object, ...]:
    return line.batch, line.number, line.model, line.custom_id, line.body


def _lost(count: int) -> LineError:
    message = f"{count} lines were lost by damage of the disk, and the input file is gone: send them again"
    return LineError("lines_lost", message, 0)


def _json(body: bytes) -> bytes:
    """Returns the body on one line if it is JSON, else its text as a JSON string."""
    try:
        msgspec.json.decode(body)
        return msgspec.json.format(body, indent=-1)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.encode(body.decode("utf-8", "replace"))


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
