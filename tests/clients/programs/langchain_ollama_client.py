"""LangChain's ChatOllama and OllamaEmbeddings."""

import json
import sys

from langchain_ollama import ChatOllama, OllamaEmbeddings

base, chat_model, embedding_model, messages = sys.argv[1:]
llm = ChatOllama(base_url=base, model=chat_model, temperature=0)
question = json.loads(messages)
long = "a cat sat on the mat " * 2000  # more than any window: Ollama cuts it
vectors = OllamaEmbeddings(base_url=base, model=embedding_model).embed_documents(["a cat", long])
print(
    json.dumps(
        {
            "chat": llm.invoke(question).content,
            "stream": [chunk.content for chunk in llm.stream(question)],
            "embeddings": [len(vector) for vector in vectors],
        }
    )
)
