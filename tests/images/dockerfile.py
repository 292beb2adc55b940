"""What of a Dockerfile a replay needs: its stages, their instructions, their arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """The instructions after one FROM, in order: (word, rest)."""

    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """The rests of every instruction of a kind."""
        return [rest for kind, rest in self.steps if kind == word]

    def one(self, word: str) -> str:
        """The rest of the only instruction of a kind."""
        (rest,) = self.all(word)
        return rest

    def env(self) -> dict[str, str]:
        """Variables of the image."""
        pairs = [pair.partition("=") for rest in self.all("ENV") for pair in rest.split()]
        return {name: value for name, _, value in pairs}

    def command(self, word: str) -> list[str]:
        """An instruction in exec form."""
        found: list[str] = json.loads(self.one(word))
        return found

    def healthcheck(self) -> list[str]:
        """The command that HEALTHCHECK runs."""
        found: list[str] = json.loads(self.one("HEALTHCHECK").partition("CMD ")[2])
        return found


def read(path: Path) -> list[Stage]:
    """The stages of a file."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    stages = [Stage()]  # what is before the first FROM
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append(Stage())
        stages[-1].steps.append((word, rest.strip()))
    return stages[1:]
