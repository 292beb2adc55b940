"""The tokenizer of one checkpoint: text to ids and ids to bytes. Knows nothing of chats or media.

Two tokenizers are held: the checkpoint's own, and a sealed copy in which special tokens carry
private names, so that text is split exactly as the whole string would be while a special token's
public name in it is plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from chiasm.tokenizer_file import read_tokenizer
from gateway.specials import SpecialTokens


class Vocabulary:
    """Encodes and decodes with the tokenizer of a checkpoint directory.

    Raises:
        ValueError: The directory has none that can be read.
    """

    def __init__(self, model_dir: Path) -> None:
        spec = read_tokenizer(model_dir)
        added = spec.get("added_tokens") or []
        special = [token["content"] for token in added if token["special"]]
        self._plain = Tokenizer.from_str(orjson.dumps(spec).decode())
        self._plain.no_truncation()
        self._plain.no_padding()
        plain = [token["content"] for token in added if not token["special"]]
        self.specials = SpecialTokens(special, plain)
        self._bytes: dict[int, bytes] = {}
        self._special_ids = frozenset(map(self._id, special))
        self._added = {token["content"]: self._id(token["content"]) for token in added}
        self._sealed = _sealed_copy(spec, self.specials)
        self._renumber = {
            self._sealed.token_to_id(self.specials.seal_of(name)): self._id(name)
            for name in special
        }
        if all(old == new for old, new in self._renumber.items()):
            self._renumber = {}

    @property
    def size(self) -> int:
        """Ids of the tokenizer, added tokens included."""
        return int(self._plain.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest(self) -> int:
        """Characters (byte-level: bytes) of the longest token."""
        return max(map(len, self._plain.get_vocab(with_added_tokens=True)))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that never become text."""
        return self._special_ids

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether every token is a run of bytes, so that ids can be decoded one by one."""
        return self._decoders == ["ByteLevel"]

    @cached_property
    def _decoders(self) -> list[str]:
        """What becomes of tokens when they are decoded, step by step."""
        decoder = orjson.loads(self._plain.to_str()).get("decoder") or {}
        return [step.get("type", "") for step in decoder.get("decoders") or [decoder]]

    def added_id(self, name: str) -> int | None:
        """The id of an added token, special or not; None when there is none of this name."""
        return self._added.get(name)

    def encode(self, text: str) -> list[int]:
        """Ids of text in which special tokens' names are plain text."""
        return self.encode_sealed(self.specials.plain(text))

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of text in which special tokens' names count."""
        return self.encode_sealed(self.specials.seal_all(text))

    def encode_sealed(self, text: str) -> list[int]:
        """Ids of text that `SpecialTokens` has sealed."""
        ids: list[int] = self._sealed.encode(text, add_special_tokens=False).ids
        return [self._renumber.get(i, i) for i in ids] if self._renumber else ids

    def _id(self, token: str) -> int:
        found = self._plain.token_to_id(token)
        assert found is not None, "an added token has an id"
        return int(found)

    def name_of(self, token_id: int) -> str:
        """The token's own text. Raises ValueError for an id without a token."""
        name = self._plain.id_to_token(token_id)
        if name is None:
            raise ValueError(f"the tokenizer has no token {token_id}")
        return str(name)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids as a whole."""
        return str(self._plain.decode(list(ids), skip_special_tokens=skip_special))

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes one id stands for; empty for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes_of(token_id)
            if found:  # there are as many as tokens, and no end of other ids
                self._bytes[token_id] = found
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._plain.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteFallback" in self._decoders:  # SentencePiece: bytes have names, spaces a sign
            byte = _BYTE_NAME.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
        if not self.is_byte_level:
            return self.decode([token_id], skip_special=False).encode()
        try:
            return bytes(_BYTE_OF[char] for char in token)
        except KeyError:  # an added token outside the byte alphabet is itself
            return token.encode()


_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet(printable: Iterable[int]) -> dict[str, int]:
    """The byte-level BPE alphabet: printable bytes are themselves, the rest follow from U+0100."""
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(256 + index): byte for index, byte in enumerate(rest)})
    return table


_BYTE_OF = _byte_alphabet([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])


def _sealed_copy(spec: dict[str, Any], specials: SpecialTokens) -> Tokenizer:
    """The tokenizer with its special tokens renamed, in the model's vocabulary as well."""
    names = [token["content"] for token in spec.get("added_tokens") or [] if token["special"]]
    for token in spec.get("added_tokens") or []:
        if token["special"]:
            token["content"] = specials.seal_of(token["content"])
    model = spec["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        for name in names:
            if name in vocab:
                vocab[specials.seal_of(name)] = vocab.pop(name)
    elif isinstance(vocab, list):
        sealed = {name: specials.seal_of(name) for name in names}
        model["vocab"] = [[sealed.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = specials.seal_of(model["unk_token"])
    tokenizer = Tokenizer.from_str(orjson.dumps(spec).decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
