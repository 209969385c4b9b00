"""The command transcribe: what is said in files of sound, as text or subtitles."""

from pathlib import Path

import click

from modelrunner.cli import output
from modelrunner.cli.client import HttpClient
from modelrunner.cli.common_options import with_client
from modelrunner.cli.prepare import first_able, prepare
from modelrunner.cli.several import each
from modelrunner.cli.transcribing import ABILITY, FORMATS, Hearing


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
