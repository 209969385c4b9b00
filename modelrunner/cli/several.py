"""Runs a command for several models; a failure does not stop the rest."""

from collections.abc import Callable, Iterable

from modelrunner.cli import FAILED, exit_code, output
from modelrunner.errors import DaemonUnreachable, ModelRunnerError


def each(models: Iterable[str], work: Callable[[str], None]) -> int:
    """Does `work` for every model, and reports each failure at once. Returns the exit code: 0, the common code of the
    failures, or "failed" if their codes differ. Raises `DaemonUnreachable`, since every other model would fail as
    well."""
    codes = set()
    for model in models:
        try:
            work(model)
        except DaemonUnreachable:
            raise
        except ModelRunnerError as error:
            output.report(error.message, retry_after=error.retry_after)
            codes.add(exit_code(error))
    return codes.pop() if len(codes) == 1 else FAILED if codes else 0
