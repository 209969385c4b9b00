"""What every client is asked: a question (tests/models/prompts.py); an answer of a schema with two values; and a
call of a tool, which its model is shown in more than `SHOWN` tokens of its prompt."""

from typing import Any

CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
SHOWN = 30
ENDLESS = {"ignore_eos": True}
"""For an answer that must not be over before a client on a busy machine has left it. llama.cpp's name."""
STORY = "Write a long story about a dragon."
"""For the same where a client or a family cannot ask so: at temperature 0 SmolLM2 writes more than 800 tokens."""
CITIES = ("Paris", "Rome")
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
