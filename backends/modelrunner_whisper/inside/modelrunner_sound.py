"""Reads files of sound, whatever their format, as mono samples of 16 bits at 16 kHz: into a file, so that a long sound
and a bomb need no memory."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import IO, Any

import av
from modelrunner_http import Refused, Stopped

RATE = 16_000
SAMPLE = 2  # bytes
# Others open further files or addresses that a file names (hls, concat), or read pictures and texts.
_FORMATS = "aac,ac3,aiff,amr,ape,asf,au,avi,caf,dts,eac3,flac,flv,matroska,mov,mp3,mpeg,mpegts,ogg,tta,w64,wav,webm,wv"
_RATES = range(1_000, 1_000_000)
_MOST_CHANNELS = 64
# How a file begins that is something else.
_OTHERS = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"\x7fELF": "a program",
    b"GGUF": "a model in GGUF",
    b"{": "JSON",
    b"<": "HTML or XML",
}


def decode(source: IO[bytes], target: IO[bytes], longest: int, stopped: Callable[[], bool]) -> int:
    """Writes the samples of the first track of `source` to `target`, and returns their number. Raises `Refused` for a
    file without sound, and for one of more than `longest` seconds; `Stopped` once `stopped()` is true."""
    most, count = longest * RATE, 0
    try:
        container: Any = av.open(
            source, mode="r", metadata_errors="ignore", options={"format_whitelist": _FORMATS, "protocol_whitelist": ""}
        )
    except (av.error.FFmpegError, ValueError, OSError):
        raise Refused(f"the file is no sound: it is {_kind(source)}", "file") from None
    with container:
        if not container.streams.audio:
            raise Refused("the file has no track of sound", "file")
        track = container.streams.audio[0]
        rate, channels = track.codec_context.sample_rate, track.codec_context.channels
        if rate not in _RATES or channels > _MOST_CHANNELS:
            raise Refused(f"the file has {rate} samples a second in {channels} channels: no sound has", "file")
        if (container.duration or 0) / 1_000_000 > longest:  # microseconds
            raise _too_long(longest)
        resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
        try:
            for frame in chain(_frames(container, track, stopped), [None]):
                for part in resampler.resample(frame):
                    count += part.samples
                    if count > most:
                        raise _too_long(longest)
                    target.write(part.to_ndarray().tobytes())
        except (av.error.FFmpegError, ValueError) as error:
            raise Refused(f"the file is damaged: its sound cannot be read ({error})", "file") from None
    if not count:
        raise Refused(f"the file has no sound that can be read: it is {_kind(source)}", "file")
    return count


def _frames(container: Any, track: Any, stopped: Callable[[], bool]) -> Iterator[Any]:
    """Yields the frames of a track; a damaged packet is left out."""
    for packet in container.demux(track):
        if stopped():
            raise Stopped
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            continue
        for frame in frames:
            frame.pts = None  # times that do not add up would be an error
            yield frame


def _too_long(longest: int) -> Refused:
    return Refused(
        f"the sound is longer than {longest} seconds: send it in parts, or set `whisper.longest` of the model",
        "file",
        413,
    )


def _kind(source: IO[bytes]) -> str:
    """Returns a guess of what the file is, in words."""
    source.seek(0)
    start = source.read(512)
    if not start:
        return "empty"
    if known := next((what for magic, what in _OTHERS.items() if start.startswith(magic)), None):
        return known
    try:
        text = start.decode("utf-8", "strict" if len(start) < 512 else "ignore")
    except UnicodeDecodeError:
        text = "\0"
    if all(sign.isprintable() or sign.isspace() for sign in text):
        return "text"
    return f"of an unknown format (it begins with {start[:8].hex(' ')})"
