"""What every client is asked: a question that SmolLM2 can answer; an answer of a schema with two values (a grammar
holds it, so it does not hang on a small model's luck); and a tool. Such a small model seldom calls one: what counts is
that it was shown the tool, in more than `SHOWN` tokens of its prompt."""

from typing import Any

SYSTEM = "You are a helpful assistant."
QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."
MESSAGES: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
SHOWN = 30
ENDLESS = {"ignore_eos": True}
"""For an answer that must not be over before a client on a busy machine has left it. llama.cpp's name."""
STORY = "Write a long story about a dragon."
"""For the same where a client or a family cannot ask so: at temperature 0 SmolLM2 writes more than 800 tokens."""
CITIES = ("Paris", "Rome")
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
