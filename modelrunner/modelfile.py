"""Modelfiles, as `modelrunner create -f` takes them: Ollama's form, with chat templates in Jinja.

Source of the form: https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx and parser/parser.go there."""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from modelrunner.defaults import SamplingOptions
from modelrunner.errors import BadRequest

_QUOTES = '"""'
_ROLES = ("system", "user", "assistant")
_WITHOUT_EFFECT = ("RENDERER", "PARSER", "REQUIRES")  # a chat template here does what Ollama has code for
_KNOWN = ("FROM", "SYSTEM", "TEMPLATE", "PARAMETER", "ADAPTER", "LICENSE", "MESSAGE", *_WITHOUT_EFFECT)
_DEPRECATED = ("penalize_newline", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mlock", "tfs_z")
"""Parameters that Ollama itself ignores."""
_WORD = re.compile(r"([^ \t\r]*)[ \t\r]*")
_BREAK = re.compile(r"[\r\n]")
# Go's syntax between braces, which Jinja never has: `{{ .Prompt }}`, `{{ $x }}`, `{{- if ...}}`, `{{ end }}`.
_GO = re.compile(r"\{\{-?\s*(?:[.$]|(?:if|range|with|else|end)\b)")
_KINDS = {**SamplingOptions.__annotations__, "num_ctx": "int | None"}


@dataclass(frozen=True, slots=True)
class Modelfile:
    """`base` is a model or a path; `parameters` are Ollama's options, `num_ctx` among them, and
    arguments of the chat template; `messages` are roles and
    contents. A `system` of "" takes the base's system prompt away."""

    base: str
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()


def decoded(data: bytes) -> str:
    """Returns the text of a file: UTF-8, or UTF-16 with a byte order mark, as some editors write it."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if wide else "utf-8-sig", "replace")


def parse(text: str) -> Modelfile:
    """Parses a Modelfile as Ollama does. Of instructions that hold once, the last counts. Takes time linear in the
    text. Raises a `BadRequest` that names the line."""
    last: dict[str, str] = {}
    lists: dict[str, list[str]] = {"ADAPTER": [], "LICENSE": []}
    parameters: dict[str, Any] = {}
    messages: list[tuple[str, str]] = []
    template_line = 0
    for line, word, name, value in _instructions(text):
        if not value and word in ("FROM", "TEMPLATE", "ADAPTER"):
            raise BadRequest(f"line {line}: {word} has no value")
        match word:
            case "ADAPTER" | "LICENSE":
                lists[word].append(value)
            case "MESSAGE":
                if name not in _ROLES:
                    raise BadRequest(f"line {line}: a message has the role {', '.join(_ROLES)}, not {name[:40]!r}")
                messages.append((name, value))
            case "PARAMETER" if name == "stop":
                parameters.setdefault(name, []).append(value)
            case "PARAMETER" if name not in _DEPRECATED:
                parameters[name] = _number(name, value, line) if name in _KINDS else _argument(value)
            case _:
                last[word] = value
                template_line = line if word == "TEMPLATE" else template_line
    if "FROM" not in last:
        raise BadRequest("the Modelfile has no FROM: add one that names a model or a file")
    template = last.get("TEMPLATE")
    if template is not None and "RENDERER" in last and _GO.search(template):
        template = None  # the renderer takes its place, for Ollama too
    return Modelfile(
        last["FROM"],
        last.get("SYSTEM"),
        template if template is None else _jinja(template, f"line {template_line}: "),
        parameters,
        tuple(lists["ADAPTER"]),
        tuple(lists["LICENSE"]),
        tuple(messages),
    )


def check_template(text: str) -> str:
    """Returns the template. Raises `BadRequest` for one in Go's language."""
    return _jinja(text, "")


def render(modelfile: Modelfile) -> str:
    """Returns a text that `parse` reads as this Modelfile again. A value that no quotation marks can hold is left out,
    and a comment says so: one with a line before its last that ends in three of them."""
    lines = [("FROM", modelfile.base)]
    for name, value in modelfile.parameters.items():
        lines += [(f"PARAMETER {name}", one) for one in (value if isinstance(value, list) else [value])]
    single = {"TEMPLATE": modelfile.template, "SYSTEM": modelfile.system}
    lines += [(word, value) for word, value in single.items() if value is not None]
    lines += [("ADAPTER", path) for path in modelfile.adapters]
    lines += [(f"MESSAGE {role}", content) for role, content in modelfile.messages]
    lines += [("LICENSE", licence) for licence in modelfile.licences]
    return "".join(map(_line, lines))


def _line(instruction: tuple[str, Any]) -> str:
    word, value = instruction
    written = _written(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    if written is None:
        return f"# {word} is left out: a line of it ends in three quotation marks, which end a value\n"
    return f"{word} {written}\n"


def _written(text: str) -> str | None:
    """Returns the text as it stands, or in one or three quotation marks; None if neither is read as the text."""
    plain = text and text == text.strip() and not text.startswith('"') and not _BREAK.search(text)
    for written in ([text] if plain else []) + [f'"""{text}"""', f'"{text}"']:
        try:
            instructions = list(_instructions(f"SYSTEM {written}\nSYSTEM -\n"))
        except BadRequest:
            continue
        if [value for *_, value in instructions] == [text, "-"]:
            return written
    return None


def _instructions(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yields the line, the instruction in capitals, the name of a parameter or the role of a message ("" for others),
    and the value without its quotation marks. A value that begins with quotation marks goes on to the first line that
    ends with as many, another one to the end of its line."""
    lines = _lines(text.removeprefix("\ufeff"))
    number = 0
    while number < len(lines):
        line, number = lines[number].lstrip(), number + 1
        begun = number
        if not line or line.startswith("#"):
            continue
        word, rest = _first_word(line)
        word = word.upper()
        if word not in _KNOWN:
            raise BadRequest(f"line {begun}: unknown instruction {word[:40]!r}; the known ones are {', '.join(_KNOWN)}")
        name = ""
        if word in ("PARAMETER", "MESSAGE"):
            name, rest = _first_word(rest)
            if not rest:
                raise BadRequest(f"line {begun}: {word} needs a name and a value")
        value = rest.strip()
        mark = next((mark for mark in (_QUOTES, '"') if value.startswith(mark)), "")
        if mark and not (value.endswith(mark) and len(value) >= 2 * len(mark)):
            pieces = [rest.lstrip()]
            while number < len(lines):
                pieces.append(lines[number])
                number += 1
                if pieces[-1].rstrip().endswith(mark):
                    break
            else:
                raise BadRequest(f"line {begun}: the value is not closed: a line must end with {mark}")
            value = "\n".join(pieces).rstrip()
        yield begun, word, name.lower(), value[len(mark) : len(value) - len(mark)]


def _lines(text: str) -> list[str]:
    """Returns the lines. A line may end in CR LF: these are a value's own only where other lines end in LF."""
    if "\r" in text and text.count("\n") == text.count("\r\n"):
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.split("\n")


def _first_word(line: str) -> tuple[str, str]:
    """Returns the first word of a line, and what follows the blank after it."""
    match = _WORD.match(line)
    assert match is not None
    return match[1], line[match.end() :]


def _number(name: str, text: str, line: int) -> int | float:
    kind = str(_KINDS.get(name, ""))
    try:
        if not text.isascii() or "_" in text:  # Python's own forms of numbers
            raise ValueError(text)
        number = float(text) if "float" in kind else int(text)
        if not -(1 << 63) <= number < 1 << 63:  # as for a number that is none
            raise ValueError(text)
    except ValueError:
        raise BadRequest(f"line {line}: the parameter {name[:40]} must be a number, not {text[:40]!r}") from None
    return number


def _argument(text: str) -> Any:
    """Returns the value of a template's argument: true, false or a number as in JSON, and any other text as it is."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _jinja(text: str, where: str) -> str:
    if _GO.search(text):
        raise BadRequest(
            f"{where}the template is in Go's language, as for Ollama; engines here need Jinja. Leave it out to use "
            "the model's own template",
            param="template",
        )
    return text
