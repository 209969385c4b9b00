"""A command for each of several models: one that fails keeps the others from nothing."""

from collections.abc import Callable, Iterable

from modelrunner.cli import FAILED, exit_code, output
from modelrunner.errors import DaemonUnreachable, ModelRunnerError


def each(models: Iterable[str], work: Callable[[str], None]) -> int:
    """Does `work` for every model, and reports what fails as it comes. Returns the exit code: 0, that of the failures
    where they are all alike, else "failed". Raises `DaemonUnreachable`, since no other model would fare better."""
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
