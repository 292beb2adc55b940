"""A checkpoint's tokenizer in the layout of tokenizer.json, whichever files it lies in.

    tokenizer.json                  as it is
    vocab.json, merges.txt          Qwen2's bytes and pattern (InternVL 2.5 and 3 over Qwen)
    tokenizer.model                 SentencePiece, merged by scores (InternVL 2.5 over InternLM2)

Of the last two, added tokens are those of tokenizer_config.json. Reads files and builds JSON; the
libraries that use it are the services' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chiasm.json_file import read_json
from chiasm.sentencepiece import Kind, Piece, read_pieces

WHOLE = "tokenizer.json"
PIECES = "tokenizer.model"
MERGES = ("vocab.json", "merges.txt")
_SPACE = "\u2581"
_QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# How Qwen2 and its successors split text before they merge bytes.
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Tokens = Mapping[int, dict[str, Any]]


def tokenizer_files(model_dir: Path) -> tuple[Path, ...]:
    """The files of the tokenizer, of which the first layout that is there counts; empty = none."""
    config = model_dir / "tokenizer_config.json"
    if (model_dir / WHOLE).is_file():
        return (model_dir / WHOLE,)
    merges = tuple(model_dir / name for name in MERGES)
    if all(path.is_file() for path in merges):
        return (*merges, config)
    pieces = model_dir / PIECES
    return (pieces, config) if pieces.is_file() else ()


def read_tokenizer(model_dir: Path) -> dict[str, Any]:
    """The JSON object that tokenizer.json holds, or would hold.

    Raises:
        ValueError: There is no tokenizer, or one of a kind that is not known.
    """
    files = tokenizer_files(model_dir)
    if not files:
        raise ValueError(f"{model_dir} has no {WHOLE}, nor {' and '.join(MERGES)}, nor {PIECES}")
    if files[0].name == WHOLE:
        return read_json(files[0])
    config = read_json(files[-1], optional=True)
    added = _added_tokens(model_dir, config)
    if files[0].name == PIECES:
        return _from_pieces(read_pieces(files[0]), added)
    kind = config.get("tokenizer_class")
    if kind not in _QWEN_CLASSES:
        known = ", ".join(_QWEN_CLASSES)
        raise ValueError(f"{model_dir} has no {WHOLE}, and {kind!r} is none of {known}")
    return _from_merges(read_json(files[0]), files[1].read_text(encoding="utf-8"), added)


def added_token(model_dir: Path, name: str) -> int:
    """The id of an added token. Raises ValueError where there is none of this name."""
    for token in read_tokenizer(model_dir).get("added_tokens") or ():
        if token["content"] == name:
            return int(token["id"])
    raise ValueError(f"{model_dir}: the tokenizer has no token {name}")


def _added_tokens(model_dir: Path, config: Mapping[str, Any]) -> Tokens:
    """By id, as tokenizer_config.json has them; older files have names and ids in another."""
    found = {
        int(key): {
            "content": token["content"],
            **{flag: bool(token.get(flag, False)) for flag in _FLAGS},
        }
        for key, token in (config.get("added_tokens_decoder") or {}).items()
    }
    for name, token_id in read_json(model_dir / "added_tokens.json", optional=True).items():
        plain = dict.fromkeys(_FLAGS, False)
        found.setdefault(int(token_id), {"content": name, **plain, "special": True})
    return found


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _from_merges(vocab: dict[str, int], merges: str, added: Tokens) -> dict[str, Any]:
    lines = (line for line in merges.splitlines() if line and not line.startswith("#version"))
    return _tokenizer(
        added,
        vocab,
        [line.split(" ", 1) for line in lines],
        normalizer={"type": "NFC"},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _QWEN_PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {**_BYTES, "use_regex": False},
            ],
        },
        decoder=_BYTES,
    )


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}


def _from_pieces(pieces: tuple[Piece, ...], added: Tokens) -> dict[str, Any]:
    """Merges in the order of their scores do what SentencePiece does; a tie may end otherwise."""
    own = {
        index: {
            "content": piece.text,
            **dict.fromkeys(_FLAGS, False),
            "special": piece.kind is not Kind.USER_DEFINED,
        }
        for index, piece in enumerate(pieces)
        if piece.kind in {Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED}
    }
    every = {**own, **added}
    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    unknown = next(p.text for p in pieces if p.kind is Kind.UNKNOWN)
    return _tokenizer(
        every,
        vocab,
        list(_merges(pieces)),
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        unknown=unknown,
    )


def _merges(pieces: tuple[Piece, ...]) -> Iterator[list[str]]:
    """Every way to make a piece of two others; those of the best piece first."""
    ids = {p.text: i for i, p in enumerate(pieces) if p.kind is Kind.NORMAL}
    scores = {text: pieces[index].score for text, index in ids.items()}
    for text in sorted(ids, key=lambda text: (-scores[text], ids[text])):
        halves = ((text[:at], text[at:]) for at in range(1, len(text)))
        found = [(ids[a], ids[b], a, b) for a, b in halves if a in ids and b in ids]
        yield from ([a, b] for _, _, a, b in sorted(found))


def _tokenizer(
    added: Tokens,
    vocab: dict[str, int],
    merges: list[list[str]],
    *,
    unknown: str | None = None,
    **steps: Any,
) -> dict[str, Any]:
    """An added token takes the place of what the vocabulary has under its id.

    Raises:
        ValueError: Ids behind the vocabulary leave gaps, which the library would close.
    """
    named = {index: text for text, index in vocab.items()}
    behind = [index for index in sorted(added) if index not in named]
    if behind != list(range(len(named), len(named) + len(behind))):
        raise ValueError(f"ids of added tokens leave gaps behind {len(named) - 1}: {behind[:5]}")
    named.update({index: token["content"] for index, token in added.items() if index in named})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, **added[index]} for index in sorted(added)],
        "post_processor": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": unknown is not None,
            "byte_fallback": unknown is not None,
            "ignore_merges": False,
            "vocab": {text: index for index, text in named.items()},
            "merges": merges,
        },
        **steps,
    }
