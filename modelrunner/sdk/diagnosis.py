"""Translates an engine's log for people, for backends. Pure.

A backend lists the causes that its engine's last words may show, and the stages that its log announces.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LONGEST_LINE = 1000  # characters of a line that are searched: an engine may write millions


@dataclass(frozen=True, slots=True)
class Cause:
    """A failure that the end of a log may show.

    `pattern` is a regular expression that is searched in one line at a time. `sentence` says what happened and what to
    do; `{0}` in it is the first group that matched. `memory` is True if the engine could not allocate memory.
    """

    pattern: str
    sentence: str
    memory: bool = False


class Diagnosis:
    """Explains the log of one engine. The first of the `causes` that matches any line explains the failure, so specific
    causes come first. `stages` are pairs of a text and the stage that a line with that text announces; the first match
    wins. `irrelevant` is a regular expression for lines that never show a cause, such as those that only inform."""

    def __init__(
        self, causes: Iterable[Cause], stages: Sequence[tuple[str, str]] = (), *, irrelevant: str | None = None
    ) -> None:
        self._causes = [(re.compile(cause.pattern), cause) for cause in causes]
        self._stages = tuple(stages)
        self._irrelevant = re.compile(irrelevant) if irrelevant else None

    def explain(self, tail: str, quotes: bool = True) -> str | None:
        """Does as `Diagnoses.explain` should. Without `quotes`, it passes over causes whose sentences have a group."""
        lines = self._lines(tail)
        for pattern, cause in self._causes:
            if not quotes and "{0" in cause.sentence:
                continue
            if match := next(filter(None, map(pattern.search, lines)), None):
                return cause.sentence.format(next((group for group in match.groups() if group), ""))
        return None

    def ran_out_of_memory(self, tail: str) -> bool:
        """Does as `Backend.ran_out_of_memory` should."""
        lines = self._lines(tail)
        return any(pattern.search(line) for pattern, cause in self._causes if cause.memory for line in lines)

    def stage(self, line: str) -> str | None:
        """Does as `Diagnoses.progress` should."""
        return next((stage for text, stage in self._stages if text in line), None)

    def _lines(self, tail: str) -> list[str]:
        lines = [line[:_LONGEST_LINE] for line in tail.splitlines()]
        return [line for line in lines if not self._irrelevant.search(line)] if self._irrelevant else lines
