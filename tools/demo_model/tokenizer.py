"""Builds the demo checkpoint's tokenizer: a byte-level BPE with one token per digit."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tools.demo_model.language import corpus

BPE_SIZE = 384
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOOL_TOKENS = ("<tool_call>", "</tool_call>")
# A word with the blank before it, one digit, other signs, or blanks.
WORD_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def token_ids() -> dict[str, int]:
    """Give the id of every special token."""
    return {name: BPE_SIZE + index for index, name in enumerate(SPECIAL_TOKENS + TOOL_TOKENS)}


def build_tokenizer() -> Tokenizer:
    """Train the byte-level BPE on the corpus and add the special tokens behind it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in TOOL_TOKENS])
    for name, token_id in token_ids().items():
        if tokenizer.token_to_id(name) != token_id:
            raise ValueError(f"{name} has id {tokenizer.token_to_id(name)}, not {token_id}")
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """Give the content of tokenizer_config.json."""
    return {
        "add_prefix_space": False,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(), indent=2) + "\n"
    )
