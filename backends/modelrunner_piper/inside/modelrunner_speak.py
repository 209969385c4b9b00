"""Serves one voice of Piper on a Unix socket. It runs in the engine's own environment."""

import asyncio
import base64
import json
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy
import onnxruntime
from modelrunner_http import Job, Refused, Server, chosen, event, json_body, settings
from piper import PiperVoice, SynthesisConfig
from piper.config import PiperConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

_LONGEST_INPUT = 4096  # characters, as OpenAI's
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
        onnxruntime.set_seed(0)  # of the noise in the voice: the same texts in the same order sound the same
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


class Speech(Server):
    """The server. `sequences` requests are worked on at once; each stops between two pieces."""

    def __init__(self, voice: Voice, sequences: int) -> None:
        super().__init__(sequences, {"/v1/audio/speech": self._speak})
        self._voice = voice

    async def _speak(self, request: Request) -> Response:
        task = self._read(await json_body(request))
        job = Job()
        self.begin(job)
        return StreamingResponse(
            self._sound(task, job), media_type="text/event-stream" if task.is_events else _FORMS[task.form][3]
        )

    def _read(self, fields: dict[str, Any]) -> Task:
        text, speed = fields.get("input"), fields.get("speed")
        if not isinstance(text, str) or not any(letter.isalnum() for letter in text):
            raise Refused("`input` must be a text with something to say", "input")
        if len(text) > _LONGEST_INPUT:
            raise Refused(f"`input` has {len(text)} characters: send at most {_LONGEST_INPUT} at a time", "input")
        speed = 1.0 if speed is None else speed
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not _SPEEDS[0] <= speed <= _SPEEDS[1]:
            raise Refused(f"`speed` must be a number from {_SPEEDS[0]} to {_SPEEDS[1]}", "speed")
        speakers = self._voice.speakers
        speaker = chosen(fields, "voice", tuple(speakers))
        form = chosen(fields, "response_format", tuple(_FORMS))
        is_events = chosen(fields, "stream_format", _STREAMS) == "sse"
        return Task(text, speakers[speaker], float(speed), form, is_events)

    async def _sound(self, task: Task, job: Job) -> AsyncIterator[bytes]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def put(data: bytes | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, data)

        working = asyncio.ensure_future(loop.run_in_executor(self.pool, self._work, task, job, put))
        try:
            while (data := await queue.get()) is not None:
                yield data
            await working
        finally:
            job.stop()
            working.add_done_callback(lambda _: self.end(job))

    def _work(self, task: Task, job: Job, put: Callable[[bytes | None], None]) -> None:
        def send(data: bytes) -> None:
            if data:
                put(event({"type": "speech.audio.delta", "audio": _text(data)}) if task.is_events else data)

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
                put(event({"type": "speech.audio.done", "usage": usage}))
        except Exception:
            traceback.print_exc()
            raise
        finally:
            put(None)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    """Loads the voice, then serves until a signal comes."""
    values = settings()
    print("loading the voice", file=sys.stderr, flush=True)
    Speech(Voice(Path(values["voice"]), values["threads"]), values["sequences"]).serve(values["socket"])


if __name__ == "__main__":
    main()
