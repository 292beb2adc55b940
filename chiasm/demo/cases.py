"""Finds the shipped checkpoint and lists the shipped pictures with their right answers.

Owns the layout of `chiasm/demo`; knows no model and decodes no picture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

VIDEO_SUFFIXES = frozenset({".mp4"})
_ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class DemoCase:
    """One question about shipped pictures or clips, and what the demo model answers."""

    title: str
    parts: tuple[Path, ...]
    question: str
    answer: str

    @property
    def has_video(self) -> bool:
        """Tell whether any part is a clip."""
        return any(part.suffix in VIDEO_SUFFIXES for part in self.parts)


def checkpoint_dir() -> Path:
    """Give the Hugging Face directory of the demo checkpoint."""
    return _ROOT / "checkpoint"


def pictures_dir() -> Path:
    """Give the directory of the shipped pictures and clips."""
    return _ROOT / "pictures"


def demo_cases() -> tuple[DemoCase, ...]:
    """List the shipped cases in the order of `cases.json`; parts are full paths."""
    entries = json.loads((pictures_dir() / "cases.json").read_text(encoding="utf-8"))
    return tuple(
        DemoCase(
            title=entry["title"],
            parts=tuple(pictures_dir() / name for name in entry["parts"]),
            question=entry["question"],
            answer=entry["answer"],
        )
        for entry in entries
    )
