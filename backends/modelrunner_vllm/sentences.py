"""What sentence-transformers adds to a model's folder, and vLLM goes by."""

import json

from modelrunner import Bundle

_FILE = "sentence_bert_config.json"


def sentence_limit(bundle: Bundle) -> int | None:
    """The longest input in tokens that the model was tuned for, which may be less than its config.json says. vLLM takes
    no larger context. None where the model has none."""
    if _FILE not in bundle.files:
        return None
    try:
        found = json.loads(bundle.files[_FILE].read_bytes()).get("max_seq_length")
    except (OSError, ValueError, AttributeError):
        return None  # damaged, as the engine will say
    return found if isinstance(found, int) and found > 0 else None
