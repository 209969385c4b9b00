"""The command transcribe: what is said in files of sound, as text or subtitles."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, failure, path
from modelrunner.cli.common_options import with_client
from modelrunner.cli.forms import form
from modelrunner.cli.prepare import first_able, prepare
from modelrunner.cli.several import each

ABILITY = "transcription"
FORMATS = ("text", "srt", "vtt", "json", "verbose_json")
_SUFFIXES = frozenset(
    ".aac .aiff .flac .m4a .mka .mkv .mov .mp3 .mp4 .oga .ogg .opus .wav .webm .wma".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Hearing:
    """How files are heard. With `translate`, the text is English."""

    model: str
    format: str = "text"
    translate: bool = False
    language: str | None = None
    prompt: str | None = None

    def show(self, client: HttpClient, file: Path) -> None:
        """Writes what is said in the file to standard output; a text as it comes. Raises `ModelRunnerError`."""
        route = f"/v1/audio/{'translations' if self.translate else 'transcriptions'}"
        streams = self.format == "text"
        fields = {"model": self.model, "language": self.language, "prompt": self.prompt}
        fields |= {"stream": "true"} if streams else {"response_format": self.format}
        body = form("file", file, {name: value for name, value in fields.items() if value is not None})
        with client.open("POST", route, body) as response:
            if not streams:
                while piece := client.piece(response):
                    sys.stdout.write(piece.decode("utf-8", "replace"))
            else:
                for text in _texts(client, response):
                    sys.stdout.write(text)
                    sys.stdout.flush()
            sys.stdout.write("" if self.format in ("srt", "vtt") else "\n")
            sys.stdout.flush()


def sounds(words: tuple[str, ...]) -> list[Path]:
    """Returns the files that the words name if each ends as sound does and is there; else none."""
    files = [Path(word).expanduser() for word in words]
    return files if all(file.suffix.lower() in _SUFFIXES and file.is_file() for file in files) else []


def transcribes(client: HttpClient, model: str) -> bool:
    """Returns whether the model writes down what it hears."""
    able = client.call("GET", path("models", model), dict[str, Any]).get("capabilities") or ()
    return ABILITY in able or "audio" in able


def _texts(client: HttpClient, response: Any) -> Iterator[str]:
    for event in client.events(response):
        if event.data == "[DONE]":  # an engine of another maker
            return
        data = decode(event.data, dict[str, Any])
        if fault := data.get("error"):
            raise failure(fault)
        if data.get("type") == "transcript.text.delta":
            yield str(data.get("delta", ""))


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False), metavar="FILE...")
@click.option("--model", metavar="MODEL", help="The model; by default one here that transcribes.")
@click.option("--format", type=click.Choice(FORMATS), default="text", help="The form of the result; by default text.")
@click.option("--language", metavar="CODE", help="The language of the sound, such as en; by default it is detected.")
@click.option("--prompt", metavar="TEXT", help="Words that are said, in their spelling, or the text before.")
@click.option("--translate", is_flag=True, help="Write in English what is said in another language.")
@with_client()
def transcribe(
    client: HttpClient,
    files: tuple[str, ...],
    model: str | None,
    format: str,
    language: str | None,
    prompt: str | None,
    translate: bool,
) -> int:
    """Write down what is said in files.

    A file has sound of any usual format, also in a video. A model or an engine that is missing is installed first.
    """
    if translate and language is not None:
        raise click.UsageError("a translation detects the language itself: leave out --language")
    chosen = model or first_able(client, ABILITY, "transcribes", "hf.co/Systran/faster-whisper-small")
    name = prepare(client, chosen, backend=None, context_size=None)
    hearing = Hearing(name, format, translate, language, prompt)

    def show(file: str) -> None:
        if len(files) > 1:
            output.heading(file, first=file == files[0])
        hearing.show(client, Path(file))

    return each(files, show)
