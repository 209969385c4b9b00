"""Serves one Whisper model by OpenAI's API of transcriptions and translations, on a Unix socket. It is the child
process of a runner, in the engine's own environment, where modelrunner is not installed.

Files of any length need the same memory: the sound lies in a file, and Whisper hears three minutes at a time."""

import sys

if __name__ == "__main__":
    print("importing faster-whisper", file=sys.stderr, flush=True)

import asyncio
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import IO, Any, TypeVar

import modelrunner_answers as answers
import numpy
from faster_whisper import WhisperModel
from modelrunner_answers import Heard, Segment, Word
from modelrunner_form import Task, read
from modelrunner_http import Job, Refused, Server, Stopped, event, failure, fault, left, settings
from modelrunner_sound import RATE, SAMPLE, decode
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

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
        languages: Sequence[str] = self._model.supported_languages
        return languages

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
            for segment in segments:
                if held is not None:
                    yield info.language, held
                held = _segment(segment, start)
            if held is not None and not last and held.start > start:
                at = int(held.start * RATE)
                continue
            if held is not None:
                yield info.language, held
            at += len(window)


def _segment(heard: Any, start: float) -> Segment:
    """Returns our form of a segment of faster-whisper, in a window that begins at `start` seconds."""
    words = [Word(each.word, _moment(start + each.start), _moment(start + each.end)) for each in heard.words or ()]
    return Segment(
        _moment(start + heard.start),
        _moment(start + heard.end),
        heard.text,
        tuple(heard.tokens),
        float(heard.temperature or 0),
        float(heard.avg_logprob),
        float(heard.compression_ratio),
        float(heard.no_speech_prob),
        words,
    )


def _moment(seconds: float) -> float:
    return round(float(seconds), 3)


class Recording(Job):
    """The work on one request, which stops after a segment. Its methods run in a thread of the pool."""

    def __init__(self, recogniser: Recogniser, task: Task, file: IO[bytes], longest: int) -> None:
        super().__init__()
        self.task = task
        self._recogniser, self._file, self._longest = recogniser, file, longest
        self._sound = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._samples = 0

    def decode(self) -> None:
        """Raises `Refused`, `Stopped`."""
        self._samples = decode(self._file, self._sound, self._longest, self.stopped.is_set)

    def hear(self, said: Callable[[str], None]) -> Heard:
        """Calls `said` with each piece of the text. Raises `Stopped`."""
        segments: list[Segment] = []
        language = self.task.language or ""
        for known, segment in self._recogniser.hear(self.task, self._sound, self._samples):
            self.check()
            said(segment.text if segments else segment.text.lstrip())
            segments.append(segment)
            language = known
        return Heard(language, round(self._samples / RATE, 3), segments)

    def close(self) -> None:
        self._sound.close()


class Transcripts(Server):
    """The server. `sequences` jobs run at once."""

    def __init__(self, recogniser: Recogniser, sequences: int, longest: int) -> None:
        calls = {"/v1/audio/transcriptions": self._transcribe, "/v1/audio/translations": self._translate}
        super().__init__(sequences, calls)
        self._recogniser, self._longest = recogniser, longest

    async def _transcribe(self, request: Request) -> Response:
        return await self._answered(request, "transcribe")

    async def _translate(self, request: Request) -> Response:
        return await self._answered(request, "translate")

    async def _answered(self, request: Request, name: str) -> Response:
        try:
            task, file = await self._read(request, name)
            job = Recording(self._recogniser, task, file.file, self._longest)
            self.begin(job)
            leaving = asyncio.create_task(left(request, job))
            is_handed = False
            try:
                await self._in_pool(job.decode)
                if task.stream:
                    stream = self._events(job, file, leaving)
                    is_handed = True
                    return StreamingResponse(stream, media_type="text/event-stream")
                kind, body = answers.answer(task, await self._in_pool(lambda: job.hear(lambda text: None)))
                return Response(body, media_type=kind)
            finally:
                if not is_handed:
                    self._close(job, file, leaving)
        except (Refused, Stopped, ClientDisconnect):
            raise
        except Exception as error:
            traceback.print_exc()
            return failure(500, fault(error))

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

    async def _events(self, job: Recording, file: UploadFile, leaving: "asyncio.Task[None]") -> AsyncIterator[bytes]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def put(piece: bytes | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, piece)

        def work() -> None:
            try:
                put(answers.done(job.hear(lambda text: put(answers.delta(text)))))
            except Stopped:
                pass
            except Exception as error:
                traceback.print_exc()
                put(event({"error": fault(error)}))
            finally:
                put(None)

        # Not in the `finally` below: there a client that leaves cancels whatever is awaited.
        loop.run_in_executor(self.pool, work).add_done_callback(lambda _: self._close(job, file, leaving))
        try:
            while (piece := await queue.get()) is not None:
                yield piece
        finally:
            job.stop()

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self.pool, work))

    def _close(self, job: Recording, file: UploadFile, leaving: "asyncio.Task[None]") -> None:
        leaving.cancel()
        job.close()
        self.end(job)
        file.file.close()


def main() -> None:
    """Loads the model, then serves until a signal comes."""
    values = settings()
    print("loading the model", file=sys.stderr, flush=True)
    Transcripts(Recogniser(values), values["sequences"], values["longest"]).serve(values["socket"])


if __name__ == "__main__":
    main()
