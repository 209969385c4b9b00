"""Serves one Whisper model by OpenAI's API of transcriptions and translations, on a Unix socket. It is the child
process of a runner, in the engine's own environment, where modelrunner is not installed. MODELRUNNER_WHISPER has its
settings.

Files of any length need the same memory: the sound lies in a file, and Whisper hears three minutes at a time."""

import sys

if __name__ == "__main__":
    print("importing faster-whisper", file=sys.stderr, flush=True)

import asyncio
import json
import os
import socket
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

import modelrunner_answers as answers
import numpy
import uvicorn
from faster_whisper import WhisperModel
from modelrunner_answers import Heard, Segment, Word
from modelrunner_form import Refused, Task, read
from modelrunner_sound import RATE, SAMPLE, Stopped, decode
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

T = TypeVar("T")
_WINDOW = 180
"""Seconds that Whisper hears at a time. A piece of text at the end of a window may be cut, so the next begins with
it."""
_MOST_PARTS = 64
_LONGEST_PART = 64 << 10  # bytes of a part that is no file
_TEMPERATURES = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
"""Those that Whisper tries one after the other for the temperature 0, until its text is not a repetition."""


class Recogniser:
    """The model. Its methods may be called by several threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._beams: int = settings["beam_size"]
        self._model: Any = WhisperModel(
            settings["model"],
            device="cpu",
            compute_type=settings["compute_type"],
            cpu_threads=settings["threads"],
            num_workers=settings["sequences"],
        )

    @property
    def languages(self) -> Sequence[str]:
        found: Sequence[str] = self._model.supported_languages
        return found

    @property
    def translates(self) -> bool:
        return bool(self._model.model.is_multilingual)

    def hear(self, task: Task, sound: IO[bytes], samples: int) -> Iterator[tuple[str, Segment]]:
        """Yields each segment with the language of the sound."""
        at, language = 0, task.language
        while at < samples:
            sound.seek(at * SAMPLE)
            window = numpy.frombuffer(sound.read(_WINDOW * RATE * SAMPLE), numpy.int16).astype(numpy.float32) / 32768
            segments, info = self._model.transcribe(
                window,
                task=task.name,
                language=language,
                beam_size=self._beams,
                temperature=task.temperature or _TEMPERATURES,
                initial_prompt=task.prompt,  # the text before a window makes Whisper repeat itself in silence
                word_timestamps=task.words or task.format in ("srt", "vtt"),  # which makes those of segments exact
                vad_filter=task.pauses,
            )
            language, start, last = info.language, at / RATE, at + len(window) >= samples
            held: Segment | None = None
            for found in segments:
                if held is not None:
                    yield info.language, held
                held = _segment(found, start)
            if held is not None and not last and held.start > start:
                at = int(held.start * RATE)
                continue
            if held is not None:
                yield info.language, held
            at += len(window)


def _segment(found: Any, start: float) -> Segment:
    """Returns our form of a segment of faster-whisper, in a window that begins at `start` seconds."""
    words = [Word(each.word, _moment(start + each.start), _moment(start + each.end)) for each in found.words or ()]
    return Segment(
        _moment(start + found.start),
        _moment(start + found.end),
        found.text,
        tuple(found.tokens),
        float(found.temperature or 0),
        float(found.avg_logprob),
        float(found.compression_ratio),
        float(found.no_speech_prob),
        words,
    )


def _moment(seconds: float) -> float:
    return round(float(seconds), 3)


class Job:
    """The work on one request. Its methods but `stop` run in a thread of the pool. `over` is set when nothing works for
    it any more."""

    def __init__(self, recogniser: Recogniser, task: Task, file: IO[bytes], longest: int) -> None:
        self.over = asyncio.Event()
        self.task = task
        self._recogniser, self._file, self._longest = recogniser, file, longest
        self._stopped = threading.Event()
        self._sound = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._samples = 0

    @property
    def left(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Ends the work after the segment that is computed."""
        self._stopped.set()

    def decode(self) -> None:
        """Raises `Refused`, `Stopped`."""
        self._samples = decode(self._file, self._sound, self._longest, self._stopped.is_set)

    def hear(self, said: Callable[[str], None]) -> Heard:
        """Calls `said` with each piece of the text. Raises `Stopped`."""
        segments: list[Segment] = []
        language = self.task.language or ""
        for known, segment in self._recogniser.hear(self.task, self._sound, self._samples):
            if self._stopped.is_set():
                raise Stopped
            said(segment.text if segments else segment.text.lstrip())
            segments.append(segment)
            language = known
        return Heard(language, round(self._samples / RATE, 3), segments)

    def close(self) -> None:
        self._sound.close()


class Server:
    """The application. `sequences` jobs run at once."""

    def __init__(self, recogniser: Recogniser, sequences: int, longest: int) -> None:
        self._recogniser, self._longest = recogniser, longest
        self._pool = ThreadPoolExecutor(sequences)
        self._jobs: set[Job] = set()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/settled", self._settled),
                Route("/v1/audio/transcriptions", self._transcribe, methods=["POST"]),
                Route("/v1/audio/translations", self._translate, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def _settled(self, request: Request) -> Response:
        """Answers once nothing works for the clients that have left until now."""
        for job in [job for job in self._jobs if job.left]:
            await job.over.wait()
        return Response(status_code=204)

    async def _transcribe(self, request: Request) -> Response:
        return await self._answered(request, "transcribe")

    async def _translate(self, request: Request) -> Response:
        return await self._answered(request, "translate")

    async def _answered(self, request: Request, name: str) -> Response:
        try:
            task, file = await self._read(request, name)
            job = Job(self._recogniser, task, file.file, self._longest)
            self._jobs.add(job)
            left = asyncio.create_task(_left(request, job))
            is_handed = False
            try:
                await self._in_pool(job.decode)
                if task.stream:
                    stream = self._events(job, file, left)
                    is_handed = True
                    return StreamingResponse(stream, media_type="text/event-stream")
                kind, body = answers.answer(task, await self._in_pool(lambda: job.hear(lambda text: None)))
                return Response(body, media_type=kind)
            finally:
                if not is_handed:
                    self._end(job, file, left)
        except Refused as refused:
            return _error(refused.status, refused.message, refused.param)
        except (Stopped, ClientDisconnect):
            return Response(status_code=499)
        except Exception as error:
            traceback.print_exc()
            return _error(500, f"the engine failed: {type(error).__name__}")

    async def _read(self, request: Request, name: str) -> tuple[Task, UploadFile]:
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise Refused("send multipart/form-data with a part `file`")
        try:
            form = await request.form(max_files=_MOST_PARTS, max_fields=_MOST_PARTS, max_part_size=_LONGEST_PART)
        except HTTPException as error:
            raise Refused(f"the form cannot be read: {error.detail}") from None
        texts: dict[str, list[str]] = {}
        files: list[UploadFile] = []
        for part, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.append(value)
            else:
                texts.setdefault(part, []).append(value)
        try:
            if "file" in texts:
                raise Refused("`file` is a text: send a file, with its name", "file")
            if len(files) != 1:
                raise Refused(f"the form has {len(files) or 'no'} files: send one, as `file`", "file")
            if name == "translate" and not self._recogniser.translates:
                raise Refused("this model knows English alone: it cannot translate", "model")
            return read(name, texts, self._recogniser.languages), files[0]
        except Refused:
            await form.close()
            raise

    async def _events(self, job: Job, file: UploadFile, left: "asyncio.Task[None]") -> AsyncIterator[bytes]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def put(event: bytes | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        def work() -> None:
            try:
                put(answers.done(job.hear(lambda text: put(answers.delta(text)))))
            except Stopped:
                pass
            except Exception as error:
                traceback.print_exc()
                put(answers.failed(f"the engine failed: {type(error).__name__}"))
            finally:
                put(None)

        # Not in the `finally` below: there a client that leaves cancels whatever is awaited.
        loop.run_in_executor(self._pool, work).add_done_callback(lambda _: self._end(job, file, left))
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            job.stop()

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._pool, work))

    def _end(self, job: Job, file: UploadFile, left: "asyncio.Task[None]") -> None:
        left.cancel()
        job.close()
        self._jobs.discard(job)
        job.over.set()
        file.file.close()


async def _left(request: Request, job: Job) -> None:
    """Stops the job when its client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.stop()


def _error(status: int, message: str, param: str | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = {413: "payload_too_large", 500: "engine_failed"}.get(status, "bad_request")
    fault = {"message": message, "type": kind, "param": param, "code": code}
    return Response(json.dumps({"error": fault}), status, media_type="application/json")


def main() -> None:
    """Loads the model, then serves until a signal comes."""
    settings = json.loads(os.environ["MODELRUNNER_WHISPER"])
    print("loading the model", file=sys.stderr, flush=True)
    server = Server(Recogniser(settings), settings["sequences"], settings["longest"])
    os.umask(0o177)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(settings["socket"])
        config = uvicorn.Config(
            server.app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listener])
    os._exit(0)  # a thread may still compute a segment


if __name__ == "__main__":
    main()
