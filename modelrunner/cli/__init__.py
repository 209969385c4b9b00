"""The command line: `main` runs one command and reports its result as the exit code.

0 done, 1 failed, 2 wrong usage, 3 the daemon cannot be reached, 4 not found, 130 interrupted. Results go to stdout;
progress, notes and errors, one line each, to stderr.
"""

import os
import sys
from collections.abc import Sequence

import click

from modelrunner.cli.advice import advised, joined
from modelrunner.cli.commands import COMMANDS, COMPLETING, cli
from modelrunner.cli.output import report
from modelrunner.errors import DaemonUnreachable, ModelRunnerError, NotFound

FAILED, WRONG_USAGE, UNREACHABLE, NOT_FOUND, INTERRUPTED = 1, 2, 3, 4, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` name, by default those of the process. Returns the exit code."""
    if sys.platform == "win32":
        report("modelrunner runs on Linux and macOS: on Windows, install and use it inside WSL 2")
        return FAILED
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not when a test or a program put something else there
            stream.reconfigure(errors="replace")
    words = sys.argv[1:] if arguments is None else arguments
    if odd := next((text for text in words if not _is_text(text)), None):
        report(f"the argument {odd!a} is not UTF-8 text")
        return WRONG_USAGE
    try:
        code = cli.main(arguments, prog_name="modelrunner", complete_var=COMPLETING, standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except click.ClickException as error:
        return _wrong_usage(error)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except ModelRunnerError as error:
        report(advised(error, _command(words)), retry_after=error.retry_after)
        return exit_code(error)
    except BrokenPipeError:
        _drop_output()
        return FAILED
    except OSError as error:  # a full disk, a file of the user's that cannot be read
        report(joined(_explained(error), "`modelrunner doctor` looks for the cause"))
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return FAILED


def _drop_output() -> None:
    """Drops what could not be written: the interpreter would write it once more at its end, and show the error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_text(argument: str) -> bool:
    """Returns False for bytes that are not UTF-8: Python keeps them as lone surrogates (PEP 383)."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def exit_code(error: ModelRunnerError) -> int:
    match error:
        case DaemonUnreachable():
            return UNREACHABLE
        case NotFound():
            return NOT_FOUND
        case _:
            return FAILED


def _wrong_usage(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # a group without one of its commands
        print(error.format_message(), file=sys.stderr)
        return WRONG_USAGE
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "modelrunner"
    report(joined(error.format_message(), f"see `{command} --help`"))
    return error.exit_code


def _command(arguments: Sequence[str]) -> str:
    """Returns the name of the command among the arguments."""
    return next((word for word in arguments if word in COMMANDS), "help")


def _explained(error: OSError) -> str:
    """Returns `/place: No space left on device`, without Python's number."""
    place = f"{error.filename}: " if error.filename is not None else ""
    return f"{place}{error.strerror}" if error.strerror else str(error)
