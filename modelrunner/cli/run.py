"""`modelrunner run`: one answer, or a chat."""

import sys
from pathlib import Path
from typing import Any

import click

from modelrunner.cli import output
from modelrunner.cli.answer import Answer, Screen, show_end, show_timings, stream
from modelrunner.cli.client import Client
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.prepare import prepare
from modelrunner.cli.request import SYSTEM, Parameters, user_message


@click.command()
@click.argument("model")
@click.argument("prompt", nargs=-1)
@click.option(
    "--system", metavar="TEXT", default=SYSTEM, help=f'The system prompt; by default "{SYSTEM}", "" for none.'
)
@click.option("--temperature", type=click.FloatRange(min=0), metavar="N", help="0 for the likeliest words.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="End the answer after so many tokens.")
@click.option("--seed", type=int, metavar="N", help="The same seed, the same answer.")
@click.option(
    "--context-size", type=click.IntRange(min=-1), metavar="N", help="Tokens, -1 for all; kept for this model."
)
@click.option("--keep-alive", metavar="DURATION", help="How long the model stays loaded: 5m, 0, or -1 for ever.")
@click.option("--backend", metavar="NAME", help="The inference engine; kept for this model.")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A picture to ask about; may be given several times.",
)
@click.option("--format", type=click.Choice(["json"]), help="Make the model answer in JSON.")
@click.option("--hide-thinking", is_flag=True, help="Do not show what a reasoning model thinks.")
@click.option("--verbose", is_flag=True, help="Show times and speeds.")
@json_option
@with_client()
def run(
    client: Client,
    model: str,
    prompt: tuple[str, ...],
    images: tuple[Path, ...],
    context_size: int | None,
    backend: str | None,
    hide_thinking: bool,
    verbose: bool,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Ask a model, or chat with it.

    Without PROMPT a chat begins. Piped text is added to the prompt. A model or an engine that is missing is
    installed first.
    """
    text = _question(prompt)
    if text is None and (images or as_json or not output.is_terminal(sys.stdout)):
        raise click.UsageError("a prompt is needed: give it as an argument or pipe it in")
    message = user_message(text, images) if text is not None else None
    name = prepare(client, model, backend=backend, context_size=context_size)
    asked = Parameters(model=name, **parameters)
    if message is None:
        from modelrunner.cli.chat import chat

        chat(client, asked, hide_thinking=hide_thinking, verbose=verbose)
    elif as_json:
        body = asked.request([message], stream=False)
        output.json(client.fetch("POST", "/v1/chat/completions", body, timeout=None))
    else:
        _answer(client, asked.request([message], stream=True), Screen(hide_thinking=hide_thinking), verbose)


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


def _answer(client: Client, body: dict[str, Any], screen: Screen, verbose: bool) -> None:
    answer = Answer()
    stream(client, body, screen, answer)
    show_end(answer)
    if verbose:
        show_timings(answer)
