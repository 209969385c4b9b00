"""Runs a command for several models; a failure does not stop the rest."""

from collections.abc import Callable, Iterable
from threading import Thread

import click

from modelrunner.cli import FAILED, exit_code, output
from modelrunner.cli.advice import advised
from modelrunner.errors import DaemonUnreachable, ModelRunnerError


def each(models: Iterable[str], work: Callable[[str], None], *, together: bool = False) -> int:
    """Does `work` for every model, one after the other or `together` in threads, and reports each failure at once.
    Returns the exit code: 0, the common code of the failures, or "failed" if their codes differ. Raises
    `DaemonUnreachable`, since every other model would fail as well."""
    codes = set()
    unreachable: list[DaemonUnreachable] = []
    command = click.get_current_context().info_name or "help"

    def do(model: str) -> None:
        try:
            work(model)
        except DaemonUnreachable as error:
            unreachable.append(error)
        except ModelRunnerError as error:
            output.report(advised(error, command), retry_after=error.retry_after)
            codes.add(exit_code(error))

    if together:
        threads = [Thread(target=do, args=(model,), daemon=True) for model in models]  # Ctrl-C does not wait for them
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for model in models:
            do(model)
            if unreachable:
                break
    if unreachable:
        raise unreachable[0]
    return codes.pop() if len(codes) == 1 else FAILED if codes else 0
