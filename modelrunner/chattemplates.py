"""Finds the capabilities of a model in the text of its chat template. A template is untrusted: the daemon searches its
text in linear time and never renders it."""

import re
from collections.abc import Collection

LARGEST = 1 << 17  # bytes; the largest templates in use have 30,000

# A comment, or a tag of Jinja (https://jinja.palletsprojects.com/templates/). The quantifiers give nothing back, so
# that a tag without an end costs no second search.
_STRING = r"'(?:[^'\\]|\\.)*+'?|\"(?:[^\"\\]|\\.)*+\"?"
_TAG = re.compile(rf"\{{#.*?(?:#\}}|\Z)|\{{[{{%]((?:[^'\"%}}]|{_STRING}|%(?!\}})|\}}(?!\}}))*+)", re.DOTALL)
_NAME = re.compile(rf"{_STRING}|(?<![\w.])([A-Za-z_]\w*)", re.DOTALL)
# transformers hands a template the tools of a request in this variable. llama.cpp reads calls only where the template
# says how a message shows them.
_TOOLS, _CALLS = "tools", "tool_calls"
_OF_REQUESTS = frozenset({"messages", "tools", "add_generation_prompt"})
# Variables that switch thinking, and the marks that models put around it.
_THINKING = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort"})
_MARKS = ("<think>", "</think>", "[THINK]", "<|channel|>analysis", "<|START_THINKING|>", "<seed:think>")


def abilities(template: str) -> frozenset[str]:
    """Returns the capabilities that a template gives a model: "chat", and "tools" and "reasoning" where the template
    handles them. Empty without a template."""
    if not template:
        return frozenset()
    names = _names(template)
    capabilities = {"chat"}
    if _TOOLS in names and _CALLS in template:
        capabilities.add("tools")
    if names & _THINKING or any(mark in template for mark in _MARKS):
        capabilities.add("reasoning")
    return frozenset(capabilities)


def variables(template: str) -> Collection[str]:
    """Returns the names in a template that an argument of a request may give a value, among others that only the
    template knows."""
    return _names(template) - _OF_REQUESTS


def _names(template: str) -> set[str]:
    """Returns the names in the template's tags, without attributes and the content of strings."""
    return {name[1] for tag in _TAG.finditer(template) if tag[1] for name in _NAME.finditer(tag[1]) if name[1]}
