"""The stored responses of OpenAI's Responses API, in SQLite: the newest ones, for a limited time."""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from modelrunner.database import Database
from modelrunner.errors import Conflict, NotFound, PayloadTooLarge

log = logging.getLogger(__name__)

_TABLE = """create table stored_responses
    (id text primary key, created real, previous text, input blob, response blob, owner text);"""
_LONGEST_CHAIN = 1000  # responses of one conversation
_GATHER = (
    0.05  # seconds in which further responses join one transaction: a commit costs more than an answer's whole way
)
_GONE = {"code": "server_error", "message": "the daemon ended before the answer was complete"}


class StoredResponse(msgspec.Struct, frozen=True):
    """`created` is in Unix seconds; `previous` is the ID of the response that it continues, "" for none; `input` has
    its own items, without those of earlier responses; `response` is the object that clients get. `owner` is an
    `ApiKey.owner`, "" for the daemon's owner. `size` is about that of its JSON, in bytes."""

    id: str
    created: float
    previous: str
    input: list[dict[str, Any]]
    response: dict[str, Any]
    owner: str = ""
    size: int = 0


class Underway(Protocol):
    """A response that is made in the background."""

    @property
    def streams(self) -> bool:
        """True if its events can be followed."""

    def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Returns its events with a higher number than `after`, as they come. Raises `NotFound`."""

    def cancel(self) -> None:
        """Ends its work."""


class ResponseStore:
    """Keeps at most `limit` responses, none longer than `age` seconds. `get` finds a response as soon as it was put; it
    is written soon after. `running` has the responses under way in the background, by their IDs.
    `owner` is the `ApiKey.owner` of the asking key, which sees its own responses alone, or "" for the daemon's owner,
    who sees all."""

    def __init__(self, path: Path, *, limit: int, age: float) -> None:
        self._database = Database(path, _TABLE)
        self._limit, self._age = limit, age
        self._unwritten: dict[str, StoredResponse] = {}
        self._deleted: set[str] = set()
        self._writing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self.running: dict[str, Underway] = {}

    def put(self, stored: StoredResponse) -> None:
        """Keeps a response, or its new state. A failing disk is only logged, since the answer itself is good."""
        if stored.id in self._deleted:
            return
        self._unwritten[stored.id] = stored
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all(), name="responses")

    async def get(self, id: str, owner: str) -> StoredResponse:
        """Returns a response. Raises `NotFound`, also for a response of another key."""
        running = id in self.running  # read first: a response that has ended was put before
        response = self._unwritten.get(id) or await asyncio.to_thread(self._read, id)
        if (
            response is None
            or owner not in ("", response.owner)
            or id in self._deleted
            or response.created < time.time() - self._age
        ):
            raise NotFound(f"there is no response {id!r}: it was not stored, or was too old", param="response_id")
        if response.response.get("status") in ("queued", "in_progress") and not running:
            return msgspec.structs.replace(response, response=response.response | {"status": "failed", "error": _GONE})
        return response

    async def before(self, id: str, owner: str, largest: int) -> tuple[list[dict[str, Any]], int]:
        """Returns the items of a conversation up to and with a response, from both sides, and their bytes. Raises
        `NotFound`, `Conflict` for a response that is not complete, `PayloadTooLarge` for more than `largest` bytes."""
        chain: list[StoredResponse] = []
        while id and len(chain) < _LONGEST_CHAIN:
            chain.append(await self.get(id, owner))
            if sum(one.size for one in chain) > largest:
                raise PayloadTooLarge(
                    f"the conversation before this request has more than {largest} bytes, which is body_limit",
                )
            if chain[-1].response.get("status") in ("queued", "in_progress"):
                raise Conflict(f"response {id!r} is not complete yet", param="previous_response_id")
            id = chain[-1].previous
        items = [item for one in reversed(chain) for item in (*one.input, *one.response["output"])]
        return items, sum(one.size for one in chain)

    async def delete(self, id: str, owner: str) -> None:
        """Deletes a response, and ends its work. Raises `NotFound`."""
        await self.get(id, owner)
        self._deleted.add(id)
        try:
            if (background := self.running.pop(id, None)) is not None:
                background.cancel()
            self._unwritten.pop(id, None)
            await self.close()
            await asyncio.to_thread(self._remove, id)
        finally:
            self._deleted.discard(id)

    async def cancel(self, id: str, owner: str) -> StoredResponse:
        """Ends the work of a response in the background; a complete response does not change. Raises `NotFound`."""
        stored = await self.get(id, owner)
        if (background := self.running.pop(id, None)) is not None:
            background.cancel()
            stored = msgspec.structs.replace(stored, response=stored.response | {"status": "cancelled"})
            self.put(stored)
        return stored

    async def close(self) -> None:
        """Returns when all is written."""
        if self._writing is not None:
            self._hurry.set()
            await asyncio.shield(self._writing)

    async def _write_all(self) -> None:
        try:
            while self._unwritten:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GATHER):
                        await self._hurry.wait()
                batch = dict(self._unwritten)
                try:
                    await asyncio.to_thread(self._write, list(batch.values()))
                except (sqlite3.Error, OSError, RecursionError) as error:
                    log.warning("responses cannot be written to %s: %s", self._database.path, error)
                for id, stored in batch.items():
                    if self._unwritten.get(id) is stored:
                        del self._unwritten[id]
        finally:
            self._writing = None
            self._hurry.clear()

    # in a thread

    def _write(self, batch: list[StoredResponse]) -> None:
        rows = [
            (
                *(one.id, one.created, one.previous),
                *(msgspec.json.encode(one.input), msgspec.json.encode(one.response), one.owner),
            )
            for one in batch
        ]
        with self._database.transaction() as database:
            columns = "id, created, previous, input, response, owner"
            database.executemany(f"insert or replace into stored_responses ({columns}) values (?, ?, ?, ?, ?, ?)", rows)
            database.execute("delete from stored_responses where created < ?", (time.time() - self._age,))
            newest = "select id from stored_responses order by created desc limit ?"
            database.execute(f"delete from stored_responses where id not in ({newest})", (self._limit,))

    def _read(self, id: str) -> StoredResponse | None:
        with self._database.transaction() as database:
            columns = "created, previous, input, response, owner"
            row = database.execute(f"select {columns} from stored_responses where id = ?", (id,)).fetchone()
        if row is None:
            return None
        created, previous, own, response, owner = row
        size = len(own) + len(response)
        return StoredResponse(
            id, created, previous, msgspec.json.decode(own), msgspec.json.decode(response), owner, size
        )

    def _remove(self, id: str) -> None:
        with self._database.transaction() as database:
            database.execute("delete from stored_responses where id = ?", (id,))
