"""The command run: one answer, the answers of several models, or a chat."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.answer import Answer, show_end, show_timings, stream
from modelrunner.cli.client import HttpClient, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.conversation import Display
from modelrunner.cli.devices import show_place
from modelrunner.cli.drawing import check_picture, draw
from modelrunner.cli.prepare import check_sees, default_system, prepare
from modelrunner.cli.request import STARTER, SYSTEM, Message, Parameters, schema, user_message
from modelrunner.cli.several import each
from modelrunner.cli.transcribe import Hearing, sounds, transcribes
from modelrunner.errors import ModelNotFound

_STARTER_SIZE = "93 MB"
_OLLAMA = {
    "--think=false": "--no-think",
    "--think=true": "--think",
    "--hidethinking": "--hide-thinking",
    "--keepalive": "--keep-alive",
}


class _Run(click.Command):
    """Takes Ollama's spelling of its options, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [_OLLAMA.get(word, word) for word in args[:end]] + args[end:])


@click.command(cls=_Run)
@click.argument("model", required=False)
@click.argument("words", nargs=-1, metavar="[MODEL]... [PROMPT]...")
@click.option(
    "--system",
    metavar="TEXT",
    help=f'The system prompt; "" for none. By default the model\'s own; if it carries none, "{SYSTEM}"',
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), metavar="N", help="The temperature; 0 for the likeliest words."
)
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="End the answer after so many tokens.")
@click.option("--seed", type=int, metavar="N", help="The seed; the same one gives the same answer.")
@click.option(
    "--context-size",
    type=click.IntRange(min=-1),
    metavar="N",
    help="The context size in tokens, -1 for all; kept for this model.",
)
@click.option(
    "--keep-alive", metavar="DURATION", help="How long the model stays loaded: 5m, 0, or -1 as long as there is room."
)
@click.option("--backend", metavar="NAME", help="The inference engine; kept for this model.")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An image to ask about; may be given several times. With --output, the image to change.",
)
@click.option(
    "-o",
    "--output",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the image of a model that draws there: png, jpeg or webp.",
)
@click.option("--format", type=click.Choice(["json"]), help="Make the model answer in JSON.")
@click.option(
    "--schema",
    "schema_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Make the model answer in JSON of this JSON schema.",
)
@click.option("--think/--no-think", default=None, help="Ask a model that can reason to do so, or not to.")
@click.option("--hide-thinking", is_flag=True, help="Hide the thinking of a reasoning model.")
@click.option("--markdown/--no-markdown", default=True, help="Render Markdown on a terminal (the default).")
@click.option("--verbose", is_flag=True, help="Show times and speeds.")
@json_option
@with_client()
def run(
    client: HttpClient,
    model: str | None,
    words: tuple[str, ...],
    images: tuple[Path, ...],
    picture: Path | None,
    schema_file: Path | None,
    context_size: int | None,
    backend: str | None,
    hide_thinking: bool,
    markdown: bool,
    verbose: bool,
    as_json: bool,
    **parameters: Any,
) -> int:
    """Ask a model, or chat with it.

    Without PROMPT a chat begins. Piped text is added to the prompt. Several models before a prompt in quotes all answer
    it, one after the other. A model that transcribes takes files of sound as PROMPT, one that draws writes its
    image to --output. A model or an engine that is missing is installed first; without MODEL, the starter model is
    offered.
    """
    if schema_file is not None:
        parameters["format"] = schema(schema_file)
    if model is None:
        model = _starter(client)
    models, prompt = _models(client, model, words)
    text = _question(prompt)
    if picture is not None:
        check_picture(picture)
    if len(models) > 1 and picture is not None:
        raise click.UsageError("one model draws one image: name one model")
    if picture is not None and len(images) > 1:
        raise click.UsageError("an image is made of one other: give --image once")
    if text is None and (picture or images or as_json or len(models) > 1 or not output.is_terminal(sys.stdout)):
        raise click.UsageError("a prompt is needed: give it as an argument or pipe it in")
    message = user_message(text, images) if text is not None and picture is None else None
    display = Display(show_thinking=not hide_thinking, markdown=markdown, verbose=verbose)

    heard = sounds(prompt) if prompt else []

    def answer(name: str) -> None:
        parameters_of_run = Parameters(
            model=prepare(client, name, backend=backend, context_size=context_size), **parameters
        )
        if picture is not None:
            draw(
                client,
                parameters_of_run.model,
                text or "",
                picture,
                parameters_of_run.seed,
                images[0] if images else None,
            )
            return
        if heard and transcribes(client, parameters_of_run.model):
            hearing = Hearing(parameters_of_run.model, "json" if as_json else "text")
            for file in heard:
                hearing.show(client, file)
            return
        if parameters_of_run.system is None:
            parameters_of_run = replace(parameters_of_run, system=default_system(client, parameters_of_run.model))
        if images:
            check_sees(client, parameters_of_run.model)
        if message is None:
            from modelrunner.cli.chat import chat

            chat(client, parameters_of_run, display)
            return
        if as_json:
            body = parameters_of_run.request([message], stream=False)
            output.json(client.fetch("POST", "/v1/chat/completions", body, timeout=None))
            return
        if len(models) > 1:
            output.heading(parameters_of_run.model, first=name == models[0])
        _answer(client, parameters_of_run, message, display)

    if len(models) > 1:
        return each(models, answer)
    answer(model)
    return 0


def _starter(client: HttpClient) -> str:
    """Returns the starter model's name, once the user agrees; asks nothing if it is here."""
    try:
        client.fetch("GET", path("models", STARTER))
    except ModelNotFound:
        if not (sys.stdin and sys.stdin.isatty() and output.is_terminal(sys.stdout)):
            raise click.UsageError(f"name a model: `modelrunner run {STARTER}` gets the starter") from None
        here = client.call("GET", "/models", list[wire.Model])
        if here:
            output.note(f"models here: {', '.join(model.name for model in here[:5])}; `modelrunner run MODEL`")
        if not click.confirm(f"Get the starter model {STARTER} ({_STARTER_SIZE}) and chat with it?", default=True):
            raise click.Abort from None
    return STARTER


def _models(client: HttpClient, model: str, words: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
    """Divides the words into further models and the prompt. The words before a last one with blanks are models if they
    name models that are here."""
    *others, last = words or ("",)
    if not others or " " not in last.strip() or any(" " in word for word in others):
        return [model], words
    models = [word for word in others if _is_here(client, word)]
    if not models:
        return [model], words
    if missing := [word for word in others if word not in models]:
        raise ModelNotFound(f"model {missing[0]!r} is not here: `modelrunner pull {missing[0]}` gets it")
    return [model, *others], (last,)


def _is_here(client: HttpClient, name: str) -> bool:
    try:
        client.fetch("GET", path("models", name))
    except ModelNotFound:
        return False
    return True


def _question(words: tuple[str, ...]) -> str | None:
    """Returns the prompt and the piped text; None at a terminal without a prompt."""
    parts = [" ".join(words)]
    if sys.stdin is not None and not sys.stdin.isatty():
        try:
            parts.append(sys.stdin.buffer.read().decode())
        except UnicodeDecodeError:
            raise click.UsageError("the piped text is not UTF-8") from None
    elif not words:
        return None
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise click.UsageError("the prompt is empty: give it as an argument or pipe it in")
    return text


def _answer(client: HttpClient, parameters: Parameters, message: Message, display: Display) -> None:
    answer = Answer()
    stream(client, parameters.request([message], stream=True), display.screen(), answer)
    show_end(answer)
    if display.verbose:
        show_timings(answer)
        show_place(client, parameters.model)
