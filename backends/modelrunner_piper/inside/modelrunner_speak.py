"""Serves one voice of Piper on a Unix socket. It runs in the engine's own environment."""

import asyncio
import base64
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy
import onnxruntime
import uvicorn
from piper import PiperVoice, SynthesisConfig
from piper.config import PiperConfig
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_LONGEST_INPUT = 4096  # characters, as OpenAI's
_LONGEST_BODY = 1 << 20
_SPEEDS = (0.25, 4.0)
_LONGEST_PIECE = 300
"""Phonemes that are spoken at once. The memory of a request grows with them."""
_FIRST_PIECE = 100
"""The same for the first piece, whose end a client waits for."""
_FORMS: dict[str, tuple[str, str, int | None, str]] = {
    "mp3": ("mp3", "libmp3lame", 24000, "audio/mpeg"),
    "opus": ("ogg", "libopus", 48000, "audio/ogg"),
    "aac": ("adts", "aac", 24000, "audio/aac"),
    "flac": ("flac", "flac", None, "audio/flac"),
    "wav": ("wav", "pcm_s16le", None, "audio/wav"),
    "pcm": ("s16le", "pcm_s16le", 24000, "audio/pcm"),
}
"""The container, the codec, the sample rate (None: the voice's own) and the media type of each response_format."""
_STREAMS = ("audio", "sse")


class Refused(Exception):
    """A request that cannot be answered."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param


@dataclass(frozen=True)
class Task:
    """A checked request."""

    text: str
    speaker: int | None
    speed: float
    form: str
    is_events: bool


class Voice:
    """The model. Its methods may be called by several threads."""

    def __init__(self, file: Path, threads: int) -> None:
        description = json.loads(file.with_name(f"{file.name}.json").read_bytes())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # A thread that waits for the others would take the time of a busy processor from them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = False  # it would keep the memory of the longest piece for good
        session = onnxruntime.InferenceSession(str(file), sess_options=options, providers=["CPUExecutionProvider"])
        self._voice: Any = PiperVoice(config=PiperConfig.from_dict(description), session=session)
        self.rate: int = self._voice.config.sample_rate
        name = str(description.get("dataset") or file.name.removesuffix(".onnx"))
        self.speakers: dict[str, int | None] = dict(self._voice.config.speaker_id_map) or {name: None}

    def speak(self, task: Task) -> Iterator[Any]:
        """Yields the sound of each piece, as an array of int16."""
        scale = self._voice.config.length_scale / task.speed
        config = SynthesisConfig(speaker_id=task.speaker, length_scale=scale)
        longest = _FIRST_PIECE
        for sentence in self._voice.phonemize(task.text):
            while sentence:
                piece, sentence = _cut(sentence, longest)
                longest = _LONGEST_PIECE
                sound = self._voice.phoneme_ids_to_audio(self._voice.phonemes_to_ids(piece), config)
                peak = max(float(numpy.max(numpy.abs(sound))), 1e-8)
                yield numpy.clip(sound / peak * 32767, -32767, 32767).astype(numpy.int16)


def _cut(phonemes: list[str], longest: int) -> tuple[list[str], list[str]]:
    """Returns the first piece and the rest: it ends after a comma, else between words."""
    if len(phonemes) <= longest:
        return phonemes, []
    for marks in (",;:", " "):
        for at in range(longest, longest // 3, -1):
            if phonemes[at - 1] in marks:
                return phonemes[:at], phonemes[at:]
    return phonemes[:longest], phonemes[longest:]


class Encoder:
    """Turns sound into the bytes of a file, as it comes."""

    def __init__(self, form: str, rate: int) -> None:
        container, codec, own, _ = _FORMS[form]
        self._bytes, self._rate, self._count = bytearray(), rate, 0
        self._container = av.open(self, "w", format=container)
        self._stream: Any = self._container.add_stream(codec, rate=own or rate, layout="mono")

    def write(self, data: bytes) -> int:
        """Takes the bytes of the container."""
        self._bytes += data
        return len(data)

    def encode(self, sound: Any) -> bytes:
        """Returns the bytes that are ready after this sound."""
        frame = av.AudioFrame.from_ndarray(sound.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = self._rate, self._count, Fraction(1, self._rate)
        self._count += sound.size
        self._container.mux(self._stream.encode(frame))
        return self._taken()

    def finish(self) -> bytes:
        """Returns the last bytes."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._taken()

    def _taken(self) -> bytes:
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken


class Job:
    """The work on one request. It stops between two pieces."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.over = asyncio.Event()


class Server:
    """The application. `sequences` requests are worked on at once."""

    def __init__(self, voice: Voice, sequences: int) -> None:
        self._voice = voice
        self._pool = ThreadPoolExecutor(sequences)
        self._jobs: set[Job] = set()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/settled", self._settled),
                Route("/v1/audio/speech", self._speak, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def _settled(self, request: Request) -> Response:
        """Answers once nothing works for the clients that have left until now."""
        for job in [job for job in self._jobs if job.stopped.is_set()]:
            await job.over.wait()
        return Response(status_code=204)

    async def _speak(self, request: Request) -> Response:
        try:
            task = self._read(await _body(request))
        except Refused as refused:
            error = {"message": refused.message, "type": "invalid_request_error", "param": refused.param}
            return Response(json.dumps({"error": error | {"code": "bad_request"}}), 400, media_type="application/json")
        except ClientDisconnect:
            return Response(status_code=499)
        job = Job()
        self._jobs.add(job)
        return StreamingResponse(
            self._sound(task, job), media_type="text/event-stream" if task.is_events else _FORMS[task.form][3]
        )

    def _read(self, body: bytes) -> Task:
        try:
            found: Any = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Refused("the body is no JSON object")
        text, speed = found.get("input"), found.get("speed")
        if not isinstance(text, str) or not any(letter.isalnum() for letter in text):
            raise Refused("`input` must be a text with something to say", "input")
        if len(text) > _LONGEST_INPUT:
            raise Refused(f"`input` has {len(text)} characters: send at most {_LONGEST_INPUT} at a time", "input")
        speed = 1.0 if speed is None else speed
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not _SPEEDS[0] <= speed <= _SPEEDS[1]:
            raise Refused(f"`speed` must be a number from {_SPEEDS[0]} to {_SPEEDS[1]}", "speed")
        speakers = self._voice.speakers
        speaker = _chosen(found, "voice", tuple(speakers))
        form = _chosen(found, "response_format", tuple(_FORMS))
        is_events = _chosen(found, "stream_format", _STREAMS) == "sse"
        return Task(text, speakers[speaker], float(speed), form, is_events)

    async def _sound(self, task: Task, job: Job) -> AsyncIterator[bytes]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def put(data: bytes | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, data)

        working = asyncio.ensure_future(loop.run_in_executor(self._pool, self._work, task, job, put))
        try:
            while (data := await queue.get()) is not None:
                yield data
            await working
        finally:
            job.stopped.set()
            working.add_done_callback(lambda _: self._end(job))

    def _work(self, task: Task, job: Job, put: Callable[[bytes | None], None]) -> None:
        def send(data: bytes) -> None:
            if data:
                put(_event({"type": "speech.audio.delta", "audio": _text(data)}) if task.is_events else data)

        try:
            if job.stopped.is_set():
                return
            encoder = Encoder(task.form, self._voice.rate)
            for sound in self._voice.speak(task):
                if job.stopped.is_set():
                    return
                send(encoder.encode(sound))
            send(encoder.finish())
            if task.is_events:
                usage = {"input_tokens": len(task.text), "output_tokens": 0, "total_tokens": len(task.text)}
                put(_event({"type": "speech.audio.done", "usage": usage}))
        except Exception:
            traceback.print_exc()
            raise
        finally:
            put(None)

    def _end(self, job: Job) -> None:
        self._jobs.discard(job)
        job.over.set()


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _LONGEST_BODY:
            raise Refused(f"the body has more than {_LONGEST_BODY} bytes", "input")
    return bytes(body)


def _chosen(found: dict[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = found.get(name, known[0])
    if value not in known:
        raise Refused(f"`{name}` must be one of: {', '.join(known[:40])}", name)
    return str(value)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(data).encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    """Loads the voice, then serves until a signal comes."""
    settings = json.loads(os.environ["MODELRUNNER_PIPER"])
    print("loading the voice", file=sys.stderr, flush=True)
    server = Server(Voice(Path(settings["voice"]), settings["threads"]), settings["sequences"])
    os.umask(0o177)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(settings["socket"])
        config = uvicorn.Config(
            server.app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listener])
    os._exit(0)  # a thread may still compute a piece


if __name__ == "__main__":
    main()
