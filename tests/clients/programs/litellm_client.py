"""LiteLLM as a client: its `openai/` models with another base URL."""

import json
import sys

import litellm

base, chat_model, embedding_model, messages = sys.argv[1:]
here = {"api_base": f"{base}/v1", "api_key": "none", "max_retries": 0}
schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": schema}}
ask = {"model": f"openai/{chat_model}", "messages": json.loads(messages), "temperature": 0, **here}

chat = litellm.completion(**ask)
stream = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)]
structured = litellm.completion(**ask, response_format=response_format)
shown = litellm.completion(**ask, tools=[tool], tool_choice="required", max_tokens=4)
texts = ["a cat", "a dog"]
vectors = litellm.embedding(model=f"openai/{embedding_model}", input=texts, encoding_format="float", **here)
models = litellm.get_valid_models(
    check_provider_endpoint=True, custom_llm_provider="openai", api_key="none", api_base=base
)
endless = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}  # not over before the client leaves
long = litellm.completion(**{**ask, **endless}, stream=True)
next(long)
long.completion_stream.close()  # leaves the stream
error = ""
try:
    litellm.completion(**{**ask, "model": "openai/nope"})
except litellm.NotFoundError as refused:
    error = type(refused).__name__
print(
    json.dumps(
        {
            "chat": chat.choices[0].message.content,
            "stream": stream,
            "structured": json.loads(structured.choices[0].message.content),
            "tools": shown.usage.prompt_tokens - chat.usage.prompt_tokens,
            "embeddings": [len(one["embedding"]) for one in vectors.data],
            "models": models,
            "error": error,
        }
    )
)
