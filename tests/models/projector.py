"""Projectors of random weights in GGUF, with which a text model takes images or sound: of the kinds that llama.cpp has,
small ones. Keys and tensors are as its clip.cpp reads them (`load_hparams`, `load_tensors`). The weights are the same
every time."""

from pathlib import Path

import gguf
import numpy as np

IMAGE_TOKENS = 16
"""Of an image of any size: one for each patch."""
SOUND_TOKENS = 150
"""Of each half minute of sound that was begun."""
_WIDTH, _INNER, _HEADS, _LAYERS = 32, 64, 2, 2
_PATCH = 14
_SIDE = _PATCH * 4
_MELS = 16
_STACKED = 10
_POSITIONS = 1500  # the encoder halves the 3000 frames of half a minute

Shapes = dict[str, tuple[int, ...]]


def write(path: Path, *, sees: bool, hears: bool, width: int) -> Path:
    """`width` is that of the text model's embeddings."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_bool("clip.has_vision_encoder", sees)
    writer.add_bool("clip.has_audio_encoder", hears)
    writer.add_bool("clip.use_gelu", True)
    shapes: Shapes = {}
    if sees:
        _add_sizes(writer, "vision", "mlp", width)
        writer.add_uint32("clip.vision.image_size", _SIDE)
        writer.add_uint32("clip.vision.patch_size", _PATCH)
        writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
        writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
        shapes |= _eyes(width)
    if hears:
        _add_sizes(writer, "audio", "ultravox", width)
        writer.add_uint32("clip.audio.num_mel_bins", _MELS)
        writer.add_uint32("clip.audio.projector.stack_factor", _STACKED)
        shapes |= _ears(width)
    random = np.random.default_rng(1)
    for name, shape in shapes.items():
        half = name.endswith("weight") and len(shape) > 1 and "position" not in name
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, sense: str, kind: str, width: int) -> None:
    writer.add_string(f"clip.{sense}.projector_type", kind)
    for name, size in {
        "embedding_length": _WIDTH,
        "feed_forward_length": _INNER,
        "block_count": _LAYERS,
        "projection_dim": width,
        "attention.head_count": _HEADS,
    }.items():
        writer.add_uint32(f"clip.{sense}.{name}", size)
    writer.add_float32(f"clip.{sense}.attention.layer_norm_epsilon", 1e-5)


def _eyes(width: int) -> Shapes:
    """CLIP's encoder, and the two layers of LLaVA 1.5."""
    return {
        "v.class_embd": (_WIDTH,),
        "v.patch_embd.weight": (_WIDTH, 3, _PATCH, _PATCH),
        "v.position_embd.weight": (IMAGE_TOKENS + 1, _WIDTH),
        "mm.0.weight": (width, _WIDTH),
        "mm.0.bias": (width,),
        "mm.2.weight": (width, width),
        "mm.2.bias": (width,),
    } | _layers("v")


def _ears(width: int) -> Shapes:
    """Whisper's encoder, and Ultravox's projector, which takes several frames together."""
    return {
        "a.conv1d.1.weight": (_WIDTH, _MELS, 3),
        "a.conv1d.1.bias": (_WIDTH, 1),
        "a.conv1d.2.weight": (_WIDTH, _WIDTH, 3),
        "a.conv1d.2.bias": (_WIDTH, 1),
        "a.position_embd.weight": (_POSITIONS, _WIDTH),
        "mm.a.norm_pre.weight": (_WIDTH * _STACKED,),
        "mm.a.mlp.1.weight": (2 * _INNER, _WIDTH * _STACKED),
        "mm.a.norm_mid.weight": (_INNER,),
        "mm.a.mlp.2.weight": (width, _INNER),
    } | _layers("a")


def _layers(prefix: str) -> Shapes:
    square = {f"attn_{part}": (_WIDTH, _WIDTH) for part in ("q", "k", "v", "out")}
    found: Shapes = {}
    for number in range(_LAYERS):
        block = f"{prefix}.blk.{number}"
        for name, (rows, columns) in {**square, "ffn_up": (_INNER, _WIDTH), "ffn_down": (_WIDTH, _INNER)}.items():
            found[f"{block}.{name}.weight"] = (rows, columns)
            if name != "attn_k":  # Whisper's keys have none
                found[f"{block}.{name}.bias"] = (rows,)
        for norm in ("ln1", "ln2"):
            found |= {f"{block}.{norm}.{kind}": (_WIDTH,) for kind in ("weight", "bias")}
    return found
