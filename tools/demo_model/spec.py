"""The demo model's shape and the JSON files of its Hugging Face directory.

Owns every number that both training and serving read; touches no weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tools.demo_model.tokenizer import token_ids

VOCAB_SIZE = 400
HIDDEN = 128
NUM_LAYERS = 8
NUM_HEADS = 4
HEAD_DIM = 32
TEXT_MLP = 320
VISION_DEPTH = 4
VISION_HIDDEN = 128
VISION_MLP = 384
FULL_ATTENTION = (1, 3)
PATCH = 14
MERGE = 2
TEMPORAL_PATCH = 2
WINDOW = 56
ROPE_THETA = 100.0
MROPE_SECTION = (4, 6, 6)
TOKENS_PER_SECOND = 2
NORM_EPS = 1e-6
FPS = 2.0
MIN_PIXELS = 112 * 112
MAX_PIXELS = 224 * 224
VIDEO_MAX_PIXELS = 168 * 168
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def _text_config() -> dict[str, object]:
    ids = token_ids()
    return {
        "model_type": "qwen2_5_vl_text",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": TEXT_MLP,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "max_window_layers": NUM_LAYERS,
        "use_sliding_window": False,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": {"type": "mrope", "mrope_section": list(MROPE_SECTION)},
        "initializer_range": 0.06,
        "attention_dropout": 0.0,
        "use_cache": True,
        "tie_word_embeddings": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def _vision_config() -> dict[str, object]:
    return {
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "depth": VISION_DEPTH,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_MLP,
        "num_heads": NUM_HEADS,
        "out_hidden_size": HIDDEN,
        "hidden_act": "silu",
        "in_channels": 3,
        "in_chans": 3,
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "tokens_per_second": TOKENS_PER_SECOND,
        "window_size": WINDOW,
        "fullatt_block_indexes": list(FULL_ATTENTION),
        "initializer_range": 0.06,
    }


def model_config() -> dict[str, object]:
    """Give the content of config.json."""
    ids = token_ids()
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "tie_word_embeddings": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "text_config": _text_config(),
        "vision_config": _vision_config(),
    }


def generation_config() -> dict[str, object]:
    """Give the content of generation_config.json: greedy, ended by either end mark."""
    ids = token_ids()
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": False,
    }


def _pixels(max_pixels: int) -> dict[str, object]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "resample": 3,
        "rescale_factor": 1 / 255,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "min_pixels": MIN_PIXELS,
        "max_pixels": max_pixels,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels},
        "processor_class": "Qwen2_5_VLProcessor",
    }


def image_config() -> dict[str, object]:
    """Give the content of preprocessor_config.json."""
    return {"image_processor_type": "Qwen2VLImageProcessor", **_pixels(MAX_PIXELS)}


def video_config() -> dict[str, object]:
    """Give the content of video_preprocessor_config.json."""
    sampling = {
        "do_sample_frames": True,
        "fps": FPS,
        "min_frames": 4,
        "max_frames": 768,
        "cap_pixels_per_frame": False,
    }
    return {
        "video_processor_type": "Qwen2VLVideoProcessor",
        **sampling,
        **_pixels(VIDEO_MAX_PIXELS),
    }


def write_configs(directory: Path) -> None:
    """Write the four JSON files that hold no vocabulary."""
    files = {
        "config.json": model_config(),
        "generation_config.json": generation_config(),
        "preprocessor_config.json": image_config(),
        "video_preprocessor_config.json": video_config(),
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
