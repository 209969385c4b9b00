"""Writes a model of random weights, as diffusers keeps it, into the folder of the first argument. It runs in the
engine's environment."""

import json
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

folder = Path(sys.argv[1])
torch.manual_seed(0)
letters = [chr(number) for number in range(33, 127)]
words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
(folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
(folder / "merges.txt").write_text("#version: 0.2\n")
tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=77)
first, last = len(words) - 2, len(words) - 1
text = CLIPTextConfig(
    hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2, vocab_size=len(words),
    bos_token_id=first, eos_token_id=last, pad_token_id=last,
)  # fmt: skip
common = {"block_out_channels": (8, 16), "norm_num_groups": 8, "layers_per_block": 1}
unet = UNet2DConditionModel(
    sample_size=32, cross_attention_dim=8, attention_head_dim=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    **common,
)  # fmt: skip
vae = AutoencoderKL(
    sample_size=64, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **common
)
StableDiffusionPipeline(
    vae, CLIPTextModel(text), tokenizer, unet, DDIMScheduler(clip_sample=False, steps_offset=1), None, None,
    requires_safety_checker=False,
).save_pretrained(folder / "tiny")  # fmt: skip
