"""Files of results, which appear only when they are complete."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click


def check_folder(file: Path) -> None:
    """Raises `UsageError` if there is no folder for the file."""
    if not file.parent.is_dir():
        raise click.UsageError(f"there is no folder {file.parent} for it: make it, or name another")


@contextmanager
def written(target: Path | None) -> Iterator[BinaryIO]:
    """Yields the file, which takes its name at the end of a block that raises nothing; standard output for None. A pipe
    or a device gets what is written as it comes."""
    if target is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if target.exists() and not target.is_file():  # a file of ours must not take its place
        with open(target, "wb") as file:
            yield file
        return
    target = target.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
