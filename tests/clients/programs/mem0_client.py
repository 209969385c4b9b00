"""mem0 with Ollama as its model and its embedder: what it found of memories that were given as they stand, and what
it says of one that its own long prompt draws from a conversation."""

import json
import os
import sys
import tempfile

folder = tempfile.mkdtemp()
os.environ |= {"MEM0_DIR": folder, "MEM0_TELEMETRY": "False"}

from mem0 import Memory  # noqa: E402

base, model, embedder, _ = sys.argv[1:]
memory = Memory.from_config(
    {
        "llm": {"provider": "ollama", "config": {"model": model, "ollama_base_url": base, "max_tokens": 16}},
        "embedder": {
            "provider": "ollama",
            "config": {"model": embedder, "ollama_base_url": base, "embedding_dims": 384},
        },
        "vector_store": {
            "provider": "qdrant",
            "config": {"path": f"{folder}/qdrant", "embedding_model_dims": 384, "collection_name": "memories"},
        },
    }
)
memory.add("I live in Paris.", user_id="kim", infer=False)
memory.add("My dog has blue eyes.", user_id="kim", infer=False)
found = memory.search("Where does kim live?", filters={"user_id": "kim"})
drawn = memory.add([{"role": "user", "content": "I like trains."}], user_id="kim")
print(json.dumps({"found": [one["memory"] for one in found["results"]], "drawn": sorted(drawn)}))
