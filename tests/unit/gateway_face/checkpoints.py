"""A tokenizer like Qwen's, trained on the spot, with every kind of added token."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFC

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "[INST]",
)
# The pattern published with Qwen2's tokenizer.json.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXT = (
    "the quick brown fox's jumper; <|im_start|> and <image> [INST] are written out here\n",
    "system user assistant tool you are a helpful assistant.\n\n  indented   text\r\n",
    '日本語 ไทย émoji 😀 👨‍👩‍👧 été naïve 0123456789 {"a": [1, 2]} <tool_call>\n',
)
TEMPLATE = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}
{%- if p.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif p.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{ p.text }}{% endif %}
{%- endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def save_qwen_like(directory: Path) -> Path:
    """Writes config.json, tokenizer.json and chat_template.jinja."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIALS]
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "model_type": "qwen2_5_vl",
        "vocab_size": 512,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def save_metaspace(directory: Path) -> Path:
    """A sentencepiece-like tokenizer: spaces as words' first letters, bytes as fallback."""
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz<>|_.,"]
    vocab = {piece: index for index, piece in enumerate([*alphabet, *letters, "▁a"])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
