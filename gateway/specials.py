"""Keeps user text from ever becoming a special token, whatever a chat template does with it.

Before a template runs, user strings are *guarded*: an invisible break goes into everything that
could become part of a special token's name. After it has run, names that are still whole are the
template's own: they are *sealed*, replaced by private names that only the sealed tokenizer knows.
Then the breaks go away. Breaks and seals are Unicode noncharacters, which user text may not hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_BREAK = "\ufdd0"
_SEAL = "\ufdd1"
MARKS = ("\ufdd4", "\ufdd5")
"""Stand for media in text that a template is given; user text may not hold them either."""
_RESERVED = str.maketrans(dict.fromkeys((_BREAK, _SEAL, *MARKS), "\ufffd"))


_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\ufdd0")


def unescaped(text: str) -> str:
    """JSON with breaks as they are, not escaped like all else beyond ASCII: they must go away."""
    return _ESCAPED.sub(rf"\1{_BREAK}", text)


class SpecialTokens:
    """The special tokens of one tokenizer, by name.

    Args:
        names: Their contents, two characters or more each (shorter ones cannot be guarded and stay
            ordinary text).
        plain: Tokens that text may name. Templates look for such (``</think>``), so they are left
            whole where a special token begins alike (``</img>``).
    """

    def __init__(self, names: Sequence[str], plain: Sequence[str] = ()) -> None:
        kept = sorted({name for name in names if len(name) > 1}, key=lambda n: (-len(n), n))
        self._sealed = {name: f"{_SEAL}{index}{_SEAL}" for index, name in enumerate(kept)}
        self._name = re.compile("|".join(map(re.escape, kept))) if kept else None
        heads = sorted({name[:2] for name in kept})
        # Zero-width: between the two first characters of a name, also where heads overlap.
        cuts = [f"(?<={re.escape(h[0])})(?={re.escape(h[1])})" for h in heads]
        whole = "|".join(re.escape(name) for name in sorted(plain, key=len, reverse=True) if name)
        kept_whole = [f"(?:{whole})"] if whole else []
        self._inside = re.compile("|".join([*kept_whole, *cuts])) if cuts else None
        self._first = tuple({name[0] for name in kept})
        self._tails = tuple({name[k:] for name in kept for k in range(1, len(name))})
        self._longest = max(map(len, kept), default=0)

    def seal_of(self, name: str) -> str:
        """The private name; names that cannot be guarded keep their own."""
        return self._sealed.get(name, name)

    def guard(self, text: str) -> str:
        """User text that no concatenation or slicing in a template turns into a special token."""
        text = text.translate(_RESERVED)
        if self._inside is None or not text:
            return text
        text = self._inside.sub(lambda match: match.group() or _BREAK, text)
        body = text.strip()
        if not body:
            return text
        start = text.index(body)
        end = start + len(body)
        if body.endswith(self._first):  # the next piece may hold the rest of a name
            text = text[:end] + _BREAK + text[end:]
        if self._continues_a_name(body):  # the piece before may hold the beginning of one
            text = text[:start] + _BREAK + text[start:]
        return text

    def guard_value(self, value: Any) -> Any:
        """Guards every string inside JSON-like data, keys included."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self.guard_value(key): self.guard_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_value(item) for item in value]
        return value

    def seal(self, rendered: str) -> str:
        """Rendered text with the template's own names sealed and all breaks gone."""
        if self._name is not None:
            rendered = self._name.sub(lambda match: self._sealed[match.group()], rendered)
        return rendered.replace(_BREAK, "")

    def seal_all(self, text: str) -> str:
        """Text of a caller who may name special tokens: all names count."""
        return self.seal(text.translate(_RESERVED))

    @staticmethod
    def plain(text: str) -> str:
        """Text in which no name counts."""
        return text.translate(_RESERVED)

    def _continues_a_name(self, body: str) -> bool:
        if body.startswith(self._tails):
            return True
        return len(body) < self._longest and any(tail.startswith(body) for tail in self._tails)
