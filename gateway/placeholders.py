"""Media in a rendered chat: finds the template's placeholders and puts each medium's script there.

Works on text before it is tokenized, since what stands beside a placeholder decides how the text
around it is split. Knows nothing of token ids.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from chiasm.plan import Modality
from gateway.specials import MARKS


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive placeholders, one per row."""

    rows: int
    token: str = ""
    """The placeholder's name; empty = the one that stood in the template."""


Script: TypeAlias = tuple[str | Run, ...]
"""Text, and runs of placeholders; empty = one run of all rows."""


def num_runs(script: Script) -> int:
    """Runs of placeholders that a script has."""
    return sum(isinstance(piece, Run) for piece in script) or 1


class Places:
    """The placeholders of one checkpoint.

    Args:
        tokens: Names of placeholder tokens, and what they stand for in a template.
    """

    def __init__(self, tokens: Mapping[str, Modality]) -> None:
        self._marks = dict(zip(Modality, MARKS, strict=True))
        self._tokens = {**tokens, **{mark: kind for kind, mark in self._marks.items()}}
        self._names = {kind: name for name, kind in reversed(list(tokens.items()))}
        self._any = re.compile("|".join(map(re.escape, self._tokens)))

    def mark(self, modality: Modality) -> str:
        """What stands for a medium in the text of a message, for templates that take text only."""
        return self._marks[modality] + "\n"

    def modalities(self, text: str) -> list[Modality]:
        """What the placeholders in a rendered chat stand for, in order."""
        return [self._tokens[match.group()] for match in self._any.finditer(text)]

    def fill(self, text: str, scripts: Sequence[Script] | None) -> str:
        """The chat with one placeholder token for each run, and the scripts' text around them."""
        left = iter(scripts or itertools.repeat(()))
        return self._any.sub(lambda match: self._written(match.group(), next(left)), text)

    def _written(self, token: str, script: Script) -> str:
        kind = self._tokens[token]
        token = self._names.get(kind, token) if token in MARKS else token
        if not script:
            return token
        return "".join(
            piece if isinstance(piece, str) else piece.token or token for piece in script
        )
