"""The second look at chat templates: each is rendered once, with some conversations, in a bounded process of its own
(templatechild.py). The first look is at their text (chattemplates.py)."""

import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

import msgspec

from modelrunner import chattemplates, durable
from modelrunner.durable import translated
from modelrunner.errors import BadRequest
from modelrunner.jsonfile import JsonFile
from modelrunner.store.describe import TEMPLATES
from modelrunner.store.names import TEMPLATE
from modelrunner.types import Bundle, ModelHeader, in_order

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("templatechild.py")
_PATIENCE = 60.0  # seconds; the child has 3 s of processor time, and a busy machine gives it little
_MOST_REMEMBERED = 4096
_MOST_TEMPLATES = 8  # of one model; engines use one or two
_OUT_OF_BOUNDS = {-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT}
_NEEDS = {"chat": ("chat",), "tools": ("tools", "tool calls"), "reasoning": ("reasoning",)}
_FOR_PYTHON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a template cannot do. All is empty for a template that renders every kind of conversation, and for one of
    which nothing is known."""

    syntax: str = ""
    """Why it cannot be parsed."""
    endless: bool = False
    """True if it does not end within the limits of time, memory and text."""
    failures: dict[str, str] = {}
    """The kinds of conversations that it does not render, each with the reason."""

    @property
    def refusal(self) -> str:
        """Returns why no engine can use the template, "" if one may."""
        if self.endless:
            return "does not end: it takes more than 3 s, 512 MiB of memory, or 4 MiB of text for a short conversation"
        return f"cannot be parsed: {self.syntax}" if self.syntax else ""

    def problem(self, abilities: Collection[str]) -> str:
        """Returns why the template has not all of the `abilities` that its text shows, "" if it has them."""
        if self.refusal:
            return self.refusal
        kinds: dict[str, list[str]] = {}
        for kind in (kind for ability in in_order(frozenset(abilities)) for kind in _NEEDS[ability]):
            if reason := self.failures.get(kind):
                kinds.setdefault(reason, []).append(kind)
        return "; ".join(f"fails for {', '.join(names)} ({reason})" for reason, names in kinds.items())

    def keeps(self, ability: str) -> bool:
        """Returns whether the template can do what its text says."""
        return not self.refusal and not self.failures.keys() & _NEEDS[ability]


_NOTHING_KNOWN = Verdict()


class Renderings:
    """Remembers the verdict on each template by its digest, also over restarts. Methods may take seconds for a new
    template: call them in a thread."""

    def __init__(self, file: Path) -> None:
        self._file = JsonFile(file, dict[str, Verdict], cache=True)
        self._known = self._file.load() or {}
        self._unknown: set[str] = set()  # the process failed for these: not asked again before the next start
        self._lock = Lock()

    def verdict(self, template: str) -> Verdict:
        """Renders the template, unless that was done before."""
        data = template.encode("utf-8", "replace")
        digest = hashlib.sha256(data).hexdigest()
        if (known := self._known.get(digest)) is not None:
            return known
        with self._lock:  # one process at a time
            if (known := self._known.get(digest)) is not None:
                return known
            verdict = None if digest in self._unknown else _looked(data)
            if verdict is None:
                self._unknown.add(digest)
                return _NOTHING_KNOWN
            while len(self._known) >= _MOST_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[digest] = verdict
            self._file.save(self._known)
            return verdict

    def require(self, template: str) -> None:
        """Raises `BadRequest` for a template that no engine can use."""
        if refusal := self.verdict(template).refusal:
            raise BadRequest(f"the chat template {refusal}", param="chat-template")

    def require_usable(self, header: ModelHeader, given: bool) -> None:
        """Raises `BadRequest` for a model that is made here with a template that does not end, or that was `given` for
        it and cannot be parsed: a file's own one can be replaced later."""
        for template in _templates(header):
            verdict = self.verdict(template)
            if verdict.endless or (given and verdict.syntax):
                raise BadRequest(
                    f"its chat template {verdict.refusal}: mend it, or give another one with `--chat-template FILE`",
                    param="chat-template",
                )

    def abilities(self, template: str) -> frozenset[str]:
        """Returns the capabilities of a template's text that it can render."""
        verdict = self.verdict(template)
        return frozenset(filter(verdict.keeps, chattemplates.abilities(template)))

    def narrowed(self, bundle: Bundle) -> Bundle:
        """Returns the model without the capabilities that its own templates show and cannot render."""
        templates = _templates(bundle.header)
        shown = frozenset[str]().union(*map(chattemplates.abilities, templates))
        lost = shown.difference(*map(self.abilities, templates))
        return replace(bundle, capabilities=bundle.capabilities - lost) if lost else bundle

    def problem(self, bundle: Bundle) -> str:
        """Returns what is wrong with the model's own templates in one sentence, "" if nothing is known to be."""
        verdicts = ((self.verdict(each), chattemplates.abilities(each)) for each in _templates(bundle.header))
        problem = next((said for verdict, abilities in verdicts if (said := verdict.problem(abilities))), "")
        return problem and f"its chat template {problem}; {_mending(bundle)}"

    def require_ending(self, bundle: Bundle) -> None:
        """Raises `BadRequest` for a model with a template that its engine would render without end."""
        for template in _templates(bundle.header):
            if (verdict := self.verdict(template)).endless:
                raise BadRequest(
                    f"{bundle.name} is not loaded: its chat template {verdict.refusal}; {_mending(bundle)}",
                    param="model",
                )


def _mending(bundle: Bundle) -> str:
    return f"give it another one with `modelrunner configure {bundle.name} --chat-template FILE`"


def _templates(header: ModelHeader) -> Sequence[str]:
    texts = (text for key, text in header.metadata.items() if key.startswith(TEMPLATES))
    return [text for text in texts if isinstance(text, str) and text][:_MOST_TEMPLATES]


def _looked(template: bytes) -> Verdict | None:
    """Returns None if the process could not do its work."""
    command = [sys.executable, "-I", str(_CHILD)]
    env = {name: os.environ[name] for name in _FOR_PYTHON if name in os.environ}
    try:
        done = subprocess.run(command, input=template, capture_output=True, timeout=_PATIENCE, env=env, check=False)
        if done.returncode in _OUT_OF_BOUNDS:
            return Verdict(endless=True)
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=Verdict)
        words = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        words = str(error)
    log.warning("a chat template could not be rendered to see what it can do (%s)", words)
    return None


_FROM_TEMPLATE = frozenset({"chat", "tools", "reasoning"})


class TemplateFiles:
    """A folder of the chat templates that the configuration holds as text, which engines read from files. The hash of a
    template's content is its file name. The files can be made again at any time."""

    def __init__(self, folder: Path, renderings: Renderings) -> None:
        """`folder` need not exist. The files of an earlier daemon are removed."""
        self._folder = folder
        self.renderings = renderings
        with translated("removing old chat templates", folder.parent):
            durable.discard(folder)

    def applied(self, bundle: Bundle, template: str) -> Bundle:
        """Returns the bundle with `template` in place of its own. Writes the file if it is not there. Raises
        `BadRequest` for one that no engine can use, `InsufficientDisk`, `StorageFailed`."""
        self.renderings.require(template)
        data = template.encode()
        file = self._folder / f"{hashlib.sha256(data).hexdigest()}.jinja"
        if not file.is_file():
            with translated("writing the chat template", self._folder.parent):
                durable.make_folder(self._folder, synced=False)
                durable.write(file, data, synced=False)
        own = bundle.capabilities - _FROM_TEMPLATE
        abilities = self.renderings.abilities(template) if "completion" in own else frozenset()
        return replace(bundle, files={**bundle.files, TEMPLATE: file}, capabilities=own | abilities)
