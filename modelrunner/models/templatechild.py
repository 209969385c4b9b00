"""Renders a chat template in a process of its own, which modelrunner/models/rendering.py starts: the template comes on
stdin, a JSON object goes to stdout. The process has little memory and time, and can open nothing.

It imports nothing of modelrunner."""

import contextlib
import json
import resource
import sys
from datetime import datetime
from typing import Any

import jinja2.debug  # jinja2 imports it late, when this process can open no file any more
from jinja2 import TemplateAssertionError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

LARGEST = 4 << 20  # characters of one rendered conversation
MEMORY = 512 << 20  # bytes
SECONDS = 3  # of processor time

_USER = {"role": "user", "content": "What is the weather in Paris?"}
_ANSWER = {"role": "assistant", "content": "It is sunny."}
_SYSTEM = {"role": "system", "content": "Be brief."}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}}
_FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": _PARAMETERS | {"required": ["city"]}}
_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}]}
_ID = "call00001"  # some templates want nine letters and digits


def _called(arguments: object, content: str | None) -> list[dict[str, Any]]:
    call = {"id": _ID, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": _ID, "name": "weather", "content": '{"sky": "clear"}'}
    return [_USER, {"role": "assistant", "content": content, "tool_calls": [call]}, result]


_Conversation = tuple[list[dict[str, Any]], dict[str, Any]]
_CITY = {"city": "Paris"}
# Of each kind one conversation has to be rendered: templates differ in the roles and the forms that they take. A
# conversation is its messages and the variables beside them.
_KINDS: dict[str, list[_Conversation]] = {
    "chat": [
        ([_USER], {}),
        ([_SYSTEM, _USER], {}),
        ([_USER, _ANSWER, _USER], {}),
        ([_SYSTEM, _USER, _ANSWER, _USER], {}),
        ([_PARTS], {}),
    ],
    "tools": [([_USER], _TOOLS), ([_SYSTEM, _USER], _TOOLS)],
    "tool calls": [
        (_called(_CITY, ""), _TOOLS),
        (_called(json.dumps(_CITY), ""), _TOOLS),
        (_called(_CITY, None), _TOOLS),
        (_called(json.dumps(_CITY), None), _TOOLS),
    ],
    "reasoning": [
        ([_USER], {"enable_thinking": True, "thinking": True}),
        ([_USER], {"enable_thinking": False, "thinking": False}),
    ],
}


# What llama.cpp gives to some templates besides.
_GIVEN = {
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "functions": "",
    "datetime": "Jan 01 2026 00:00:00 GMT",
}


class _Generation(Extension):
    """The block that marks an assistant's answer for training (transformers)."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        statements: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return statements


class _Failed(Exception):
    """The template itself refuses a conversation."""


def _raise(message: object = "") -> None:
    raise _Failed(str(message))


def _json(value: object, indent: int | None = None, ensure_ascii: bool = False, **_: object) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, default=str)


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns an environment with the helpers that transformers and llama.cpp give to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], cache_size=0
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "range": range,  # the sandbox's own ends a long loop, which an engine would run
    }
    return environment


def _render(template: jinja2.Template, messages: list[dict[str, Any]], extra: dict[str, Any]) -> None:
    """Raises `MemoryError` for a text that is too long."""
    size = 0
    for piece in template.generate(messages=json.loads(json.dumps(messages)), **_GIVEN, **extra):
        size += len(piece)
        if size > LARGEST:
            raise MemoryError


def _line(error: BaseException) -> str:
    """Returns the line of the template where the error arose, "line 7: ", "" if that is unknown."""
    number, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            number = trace.tb_lineno
        trace = trace.tb_next
    return f"line {number}: " if number else ""


def _said(error: BaseException) -> str:
    return f"{_line(error)}{str(error).rstrip('.') or type(error).__name__}"[:300]


def _failure(template: jinja2.Template, kind: str) -> str:
    """Returns why the template renders no conversation of the kind, "" if it renders one. All are tried, because each
    may be the one that never ends."""
    failures: list[str] = []
    for messages, extra in _KINDS[kind]:
        try:
            _render(template, messages, extra)
        except (MemoryError, RecursionError):
            raise
        except (SecurityError, ImportError, OSError):  # what an engine may allow, such as a change of a list
            failures.append("")
        except Exception as error:
            failures.append(_said(error))
        else:
            failures.append("")
    return "" if "" in failures else failures[0]


def look(text: str) -> dict[str, Any]:
    """Returns what a template cannot do: `syntax` says why it cannot be parsed, `endless` is true for one that does not
    end within the limits, `failures` says why it renders no conversation of a kind."""
    try:
        template = _environment().from_string(text)
    except TemplateAssertionError:  # a filter or a test that an engine may have
        return {}
    except TemplateSyntaxError as error:
        is_open = "unknown tag" in (error.message or "") and "looking for" not in (error.message or "")
        return {} if is_open else {"syntax": _said(error)}
    except (MemoryError, RecursionError):
        return {"endless": True}
    except Exception:  # a limit of jinja2 alone, such as the depth of blocks
        return {}
    try:
        failures = {kind: _failure(template, kind) for kind in _KINDS}
    except (MemoryError, RecursionError):
        return {"endless": True}
    return {"failures": {kind: failure for kind, failure in failures.items() if failure}}


def _limit() -> None:
    own = {"RLIMIT_AS": MEMORY, "RLIMIT_CPU": SECONDS, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 0}
    for name, most in own.items():
        kill = most + (name == "RLIMIT_CPU")  # XCPU ends the process a second before KILL would
        with contextlib.suppress(ValueError, OSError):  # macOS does not limit the address space
            resource.setrlimit(getattr(resource, name), (most, kill))


if __name__ == "__main__":
    given = sys.stdin.buffer.read().decode("utf-8", "replace")
    look("{{ 'x' | trim | tojson }}{{ strftime_now('%d') }}")  # reads what Python reads late
    _limit()
    answer = json.dumps(look(given))
    sys.stdout.write(answer)
