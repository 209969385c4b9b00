"""LangChain's ChatOpenAI and OpenAIEmbeddings."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

base, chat_model, embedding_model, messages = sys.argv[1:]
schema = {
    "title": "Answer",
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
}
llm = ChatOpenAI(base_url=f"{base}/v1", api_key="none", model=chat_model, temperature=0, max_retries=0)
question = json.loads(messages)
structured = llm.with_structured_output(schema, method="json_schema")
vectors = OpenAIEmbeddings(
    base_url=f"{base}/v1", api_key="none", model=embedding_model, check_embedding_ctx_length=False
).embed_documents(["a cat", "a dog"])
tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": schema}}
few = llm.bind(max_tokens=4)
without, shown = (
    few.invoke(question),
    llm.bind_tools([tool], tool_choice="required").bind(max_tokens=4).invoke(question),
)
long = llm.bind(max_tokens=4000, extra_body={"ignore_eos": True}).stream("Count to a million.")
next(long)
long.close()  # leaves the stream
error = ""
try:
    ChatOpenAI(base_url=f"{base}/v1", api_key="none", model="nope", max_retries=0).invoke("x")
except openai.NotFoundError:  # LangChain's own class derives from it
    error = "NotFoundError"
print(
    json.dumps(
        {
            "chat": llm.invoke(question).content,
            "stream": [chunk.content for chunk in llm.stream(question)],
            "structured": structured.invoke(question),
            "embeddings": [len(vector) for vector in vectors],
            "tools": shown.usage_metadata["input_tokens"] - without.usage_metadata["input_tokens"],
            "error": error,
        }
    )
)
