"""Modelfiles, as `modelrunner create -f` takes them: Ollama's form
(https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx), with chat templates in Jinja."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from modelrunner.defaults import SamplingOptions
from modelrunner.errors import BadRequest

_QUOTES = '"""'
_ROLES = ("system", "user", "assistant")
_ONCE = ("FROM", "SYSTEM", "TEMPLATE")
_KNOWN = (*_ONCE, "PARAMETER", "ADAPTER", "LICENSE", "MESSAGE")
# Go's syntax between braces, which Jinja never has: `{{ .Prompt }}`, `{{ $x }}`, `{{- if ...}}`, `{{ end }}`.
_GO = re.compile(r"\{\{-?\s*(?:[.$]|(?:if|range|with|else|end)\b)")
_KINDS = {**SamplingOptions.__annotations__, "num_ctx": "int | None"}


@dataclass(frozen=True, slots=True)
class Modelfile:
    """`base` is a model or a path; `parameters` are Ollama's options, `num_ctx` among them; `messages` are roles and
    contents. A `system` of "" takes the base's system prompt away."""

    base: str
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()


def parse(text: str) -> Modelfile:
    """Parses a Modelfile. Raises a `BadRequest` that names the line."""
    made = Modelfile("")
    seen: set[str] = set()
    for line, word, value, quoted in _instructions(text):
        if word in _ONCE and word in seen:
            raise BadRequest(f"line {line}: {word} stands twice")
        seen.add(word)
        if not value and word != "SYSTEM":
            raise BadRequest(f"line {line}: {word} has no value")
        match word:
            case "FROM":
                made = replace(made, base=value)
            case "SYSTEM":
                made = replace(made, system=value)
            case "TEMPLATE":
                made = replace(made, template=_jinja(value, f"line {line}: "))
            case "ADAPTER":
                made = replace(made, adapters=(*made.adapters, value))
            case "LICENSE":
                made = replace(made, licences=(*made.licences, value))
            case "MESSAGE":
                role, content = _two(value, line, word, quoted)
                if role not in _ROLES:
                    raise BadRequest(f"line {line}: a message has the role {', '.join(_ROLES)}, not {role[:40]!r}")
                made = replace(made, messages=(*made.messages, (role, content)))
            case "PARAMETER":
                made = replace(made, parameters=_with(made.parameters, *_two(value, line, word, quoted), line))
    if not made.base:
        raise BadRequest("the Modelfile has no FROM: add one that names a model or a file")
    return made


def check_template(text: str) -> str:
    """Returns the template. Raises `BadRequest` for one in Go's language."""
    return _jinja(text, "")


def render(modelfile: Modelfile) -> str:
    """Returns a text that `parse` reads as this Modelfile again, unless a value holds three quotation marks."""
    lines = [("FROM", modelfile.base)]
    for name, value in modelfile.parameters.items():
        lines += [("PARAMETER", f"{name} {_written(one)}") for one in (value if isinstance(value, list) else [value])]
    single = {"TEMPLATE": modelfile.template, "SYSTEM": modelfile.system}
    lines += [(word, _quoted(value)) for word, value in single.items() if value is not None]
    lines += [("ADAPTER", path) for path in modelfile.adapters]
    lines += [("MESSAGE", f"{role} {_quoted(content)}") for role, content in modelfile.messages]
    lines += [("LICENSE", _quoted(licence)) for licence in modelfile.licences]
    return "".join(f"{word} {value}\n" for word, value in lines)


def _instructions(text: str) -> Iterator[tuple[int, str, str, bool]]:
    """Yields the line, the instruction in capitals, its value without quotation marks, and whether it had three."""
    lines = text.replace("\r\n", "\n").split("\n")
    number = 0
    while number < len(lines):
        line, number = lines[number], number + 1
        begun = number
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, value = [*line.split(None, 1), ""][:2]
        word = word.upper()
        if word not in _KNOWN:
            raise BadRequest(f"line {begun}: unknown instruction {word[:40]!r}; the known ones are {', '.join(_KNOWN)}")
        before, opened, rest = value.partition(_QUOTES)
        if opened and _QUOTES not in rest:  # the value goes on to the line that ends them
            pieces = [rest]
            while number < len(lines):
                pieces.append(lines[number])
                number += 1
                if _QUOTES in pieces[-1]:
                    break
            else:
                raise BadRequest(f"line {begun}: the three quotation marks are not closed")
            rest = "\n".join(pieces)
        if opened:
            inside, _, after = rest.partition(_QUOTES)
            if after.strip():
                raise BadRequest(f"line {number}: there is {after.strip()[:40]!r} after three quotation marks")
            yield begun, word, before + inside, True
        else:
            yield begun, word, _unquoted(value.strip()), False


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) >= 2 and value[0] == value[-1] == '"' else value


def _two(value: str, line: int, word: str, quoted: bool) -> tuple[str, str]:
    first, _, rest = value.partition(" ")
    if not (quoted or rest.strip()):
        raise BadRequest(f"line {line}: {word} needs a name and a value")
    return first.lower(), rest if quoted else _unquoted(rest.strip())


def _with(parameters: dict[str, Any], name: str, text: str, line: int) -> dict[str, Any]:
    kind = str(_KINDS.get(name, ""))
    if name == "stop":
        return parameters | {name: [*parameters.get(name, []), text]}
    try:
        return parameters | {name: float(text) if "float" in kind else int(text)}
    except ValueError:
        raise BadRequest(f"line {line}: the parameter {name[:40]} must be a number, not {text[:40]!r}") from None


def _jinja(text: str, where: str) -> str:
    if _GO.search(text):
        raise BadRequest(
            f"{where}the template is in Go's language, as for Ollama; engines here need Jinja. Leave it out to use "
            "the model's own template",
            param="template",
        )
    return text


def _written(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value) if "\n" in value else f'"{value}"'
    return str(value)


def _quoted(text: str) -> str:
    return f"{_QUOTES}{text}{_QUOTES}"
