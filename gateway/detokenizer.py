"""Token ids of one choice to text, piece by piece: whole characters only, cut at stop strings.

The rule at the end, the same streamed or not: a character the model did not finish is dropped.
U+FFFD appears only where the model produced bytes that no continuation could have made valid.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gateway.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"


class Piece(NamedTuple):
    """Text that is final, and whether a stop string has ended the choice."""

    text: str
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How ids become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether the stop string is part of the text."""
    kept: frozenset[int] = frozenset()
    """Special tokens that stay in the text, by name."""


class Detokenizer:
    """One choice's text. Joined pieces = the whole text up to the leftmost stop string."""

    def __init__(self, vocabulary: Vocabulary, manner: Manner = Manner()) -> None:
        self._skip = vocabulary.special_ids - manner.kept
        self._decoder: _Decoder = (
            _ByteDecoder(vocabulary) if vocabulary.is_byte_level else _WindowDecoder(vocabulary)
        )
        self._stops = StopStrings(manner.stop, include=manner.include_stop)

    @property
    def stopped(self) -> bool:
        """A stop string was found; ids that still come add no text."""
        return self._stops.found

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Takes the next ids; returns what can be said for sure."""
        stops = self._stops
        if stops.found:
            return Piece("", True)
        if not self._skip.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._skip]
        text = self._decoder.push(token_ids) if token_ids else ""
        return Piece(stops.push(text) if text else "", stops.found)

    def flush(self) -> str:
        """The rest, at the end of the choice. `stopped` may become true here."""
        return "" if self.stopped else self._stops.flush(self._decoder.flush())


class StopStrings:
    """Holds back only what may still become a stop string; cuts before the leftmost match.

    Leftmost means over the whole text, however it was split: where a longer stop string that began
    earlier is still open when a shorter one is complete, the decision waits for it.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        assert all(stop), "stop strings are not empty"
        self._stop = stop
        self._include = include
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Takes more text; returns what is final."""
        if not self._stop:
            return text
        self._held += text
        match = self._match()
        open_at = self._open_prefix()
        if match >= 0 and not 0 <= open_at < match:
            self.found = True
            return self._release(self._cut(match), keep=False)
        return self._release(open_at if open_at >= 0 else len(self._held))

    def flush(self, text: str = "") -> str:
        """The rest; a match that waited for a longer one counts now."""
        out = self.push(text) if text else ""
        if self.found:
            return out
        match = self._match()
        self.found = match >= 0
        until = self._cut(match) if self.found else len(self._held)
        return out + self._release(until, keep=False)

    def _cut(self, match: int) -> int:
        """Where the text ends: before the stop string, or behind the shortest that begins there."""
        if not self._include:
            return match
        return match + min(len(s) for s in self._stop if self._held.startswith(s, match))

    def _match(self) -> int:
        found = (self._held.find(stop) for stop in self._stop)
        return min((at for at in found if at >= 0), default=-1)

    def _open_prefix(self) -> int:
        """Where the earliest tail begins that is a true prefix of a stop string; -1 if none."""
        best = len(self._held)
        for stop in self._stop:
            at = self._held.find(stop[0], max(0, len(self._held) - len(stop) + 1), best)
            while at >= 0:
                if stop.startswith(self._held[at:]):
                    best = at
                    break
                at = self._held.find(stop[0], at + 1, best)
        return best if best < len(self._held) else -1

    def _release(self, until: int, *, keep: bool = True) -> str:
        out, rest = self._held[:until], self._held[until:]
        self._held = rest if keep else ""
        return out


class _Decoder(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteDecoder:
    """Byte-level vocabularies: ids are bytes, and UTF-8 knows where a character ends."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_open = False  # a character is

    def push(self, token_ids: Sequence[int]) -> str:
        data = b"".join(map(self._vocabulary.bytes_of, token_ids))
        if not self._is_open and data.isascii():
            return data.decode()
        text = self._utf8.decode(data)
        self._is_open = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        held = self._utf8.getstate()[0]
        self._utf8.reset()
        self._is_open = False
        # CPython waits for the third byte of a surrogate, which no byte can make a character.
        is_surrogate = held[:1] == b"\xed" and held[1:] >= b"\xa0"
        return _REPLACEMENT * len(held) if is_surrogate else ""


class _WindowDecoder:
    """Any vocabulary: decodes a short window of ids and says what is new in it.

    A window that ends in U+FFFD may be an open character of up to four byte tokens, and waits.
    """

    _MOST_OPEN = 4

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._said: list[int] = []  # context: the ids of the last piece
        self._open: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        return self._new_text().rstrip(_REPLACEMENT) if self._open else ""

    def _push_one(self, token_id: int) -> str:
        self._open.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._open) < self._MOST_OPEN:
            return ""
        self._said, self._open = self._open, []
        return text

    def _new_text(self) -> str:
        before = self._vocabulary.decode(self._said) if self._said else ""
        return self._vocabulary.decode(self._said + self._open)[len(before) :]
