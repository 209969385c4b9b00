"""Writes a tiny model that sees, of random weights and SmolVLM's kind: python tiny_vision.py TOKENIZER FOLDER

It runs in the engine's own environment, which has transformers. Of the architectures that vLLM knows this is one whose
images need no torchvision."""

import sys

import torch
from transformers import AddedToken, AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)
MARKS = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
SIDE, PATCH, SCALE = 32, 8, 2  # pixels, pixels, patches of a token's side
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2


def write(tokenizer_folder: str, folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.chat_template = TEMPLATE
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE)
    # Attention on a processor has heads of 32 at least.
    layers = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "max_position_embeddings": 2048, "pad_token_id": 0}
    config = Idefics3Config(
        text_config={"model_type": "llama", **layers, **text},
        vision_config={"model_type": "idefics3_vision", **layers, "image_size": SIDE, "patch_size": PATCH},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    write(*sys.argv[1:])
