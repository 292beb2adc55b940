"""Thoughts between tags, before the answer: read as they come."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.dialects.base import partial


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """How a family marks thoughts. A prompt may end with the opening tag."""

    opening: str = "<think>"
    closing: str = "</think>"


class ThoughtReader:
    """Splits an answer into thought and speech.

    Args:
        tags: The family's.
        open: Whether the prompt has opened a thought.
    """

    def __init__(self, tags: ThinkTags, *, open: bool) -> None:
        self._tags = tags
        self._held = ""
        self._begun = open
        """Whether the answer is a thought; not known before its first words."""
        self._over = False
        self._told = False  # whether the thought, then the speech, has had its first words

    def push(self, text: str) -> tuple[str, str]:
        """Takes more text; returns what is final of the thought, and of the speech."""
        if self._over:
            return "", self._speech(text)
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if self._tags.opening.startswith(start[: len(self._tags.opening)]):
                if len(start) < len(self._tags.opening):
                    return "", ""
                self._begun, self._held = True, start[len(self._tags.opening) :]
            else:
                self._over = self._told = True
                return "", self._take(len(self._held))
        at = self._held.find(self._tags.closing)
        if at < 0:
            keep = partial(self._held, self._tags.closing)
            return self._thought(self._take(len(self._held) - keep)), ""
        thought = self._thought(self._take(at).rstrip("\n"), last=True)
        rest = self._held[len(self._tags.closing) :]
        self._held, self._over, self._told = "", True, False
        return thought, self._speech(rest)

    def flush(self) -> tuple[str, str]:
        """The rest, at the end of the answer."""
        rest, self._held = self._held, ""
        if self._over or not self._begun:
            return "", rest
        return self._thought(rest, last=True), ""

    def _take(self, size: int) -> str:
        out, self._held = self._held[:size], self._held[size:]
        return out

    def _thought(self, text: str, *, last: bool = False) -> str:
        """Line breaks at both ends belong to the tags."""
        if not self._told:
            text = text.lstrip("\n")
            self._told = bool(text)
        if last:
            return text
        kept = len(text.rstrip("\n"))
        self._held = text[kept:] + self._held
        return text[:kept]

    def _speech(self, text: str) -> str:
        if not self._told:
            text = text.lstrip("\n")
            self._told = bool(text)
        return text
