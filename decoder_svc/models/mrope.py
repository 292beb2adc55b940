"""M-RoPE positions of a prompt, from the plans' grids (Qwen2-VL report, section 2.1; numpy only).

Text counts up on all three axes alike. A run of a medium's rows carries time, height and width of
their place in the merged grid; text after it goes on where its larger side ends, however long a
clip runs: so does the reference when it generates. A clip is one run, or one run per temporal group
with its time in words before it: each of those counts from its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chiasm.plan import Grid, MediaPlan, Modality, Promise


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Positions of a prompt's tokens, and what its answer's tokens add to their index."""

    grid: npt.NDArray[np.int32]
    """[3, prompt]: time, height, width."""
    delta: int


def prompt_positions(
    num_tokens: int, promises: Sequence[Promise], *, merge: int, tokens_per_second: float
) -> PromptPositions:
    """Positions for a prompt with media.

    Args:
        num_tokens: Tokens of the prompt, placeholders included.
        promises: In prompt order, one grid each, its temporal groups spread evenly over its runs.
        merge: Patches along one side of a merged patch.
        tokens_per_second: Time positions per second of a clip.
    """
    grid = np.empty((3, num_tokens), dtype=np.int32)
    index = position = 0
    for promise in promises:
        size = promise.plan.grids[0]
        step = _time_step(promise.plan, tokens_per_second)
        rows = _grid_positions(Grid(size.t // len(promise.runs), size.h, size.w), merge, step)
        for run in promise.runs:
            text = run.begin - index
            grid[:, index : index + text] = np.arange(position, position + text)
            index, position = index + text, position + text
            grid[:, index : index + rows.shape[1]] = rows + position
            index += rows.shape[1]
            position += max(size.h, size.w) // merge
    end = position + num_tokens - index
    grid[:, index:] = np.arange(position, end)
    return PromptPositions(grid, end - num_tokens)


def _time_step(plan: MediaPlan, tokens_per_second: float) -> np.float32:
    """Positions from one temporal group of a run to the next, as a float."""
    if plan.modality is not Modality.VIDEO:
        return np.float32(1.0)
    return np.float32(tokens_per_second) * np.float32(plan.seconds_per_grid)


def _grid_positions(size: Grid, merge: int, step: np.float32) -> npt.NDArray[np.int32]:
    """[3, rows], from zero. A clip's time is scaled as a float and floored at the very end."""
    height, width = size.h // merge, size.w // merge
    places = np.empty((3, size.t, height, width), dtype=np.int32)
    places[0] = np.floor(np.arange(size.t, dtype=np.float32) * step)[:, None, None]
    places[1] = np.arange(height)[:, None]
    places[2] = np.arange(width)
    return places.reshape(3, -1)
