"""M-RoPE positions of a prompt, from the plans' grids (Qwen2-VL report, section 2.1; numpy only).

Text counts up on all three axes alike. A medium's rows carry time, height and width of their place
in the merged grid; text after it goes on where its larger side ends, however long a clip runs: so
does the reference when it generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chiasm.plan import Modality, Promise


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
        promises: In prompt order, one grid each.
        merge: Patches along one side of a merged patch.
        tokens_per_second: Time positions per second of a clip.
    """
    grid = np.empty((3, num_tokens), dtype=np.int32)
    index = position = 0
    for promise in promises:
        text = promise.prompt_offset - index
        grid[:, index : index + text] = np.arange(position, position + text)
        index, position = index + text, position + text
        rows = _media_positions(promise, merge, tokens_per_second)
        grid[:, index : index + rows.shape[1]] = rows + position
        index += rows.shape[1]
        size = promise.plan.grids[0]
        position += max(size.h, size.w) // merge
    end = position + num_tokens - index
    grid[:, index:] = np.arange(position, end)
    return PromptPositions(grid, end - num_tokens)


def _media_positions(
    promise: Promise, merge: int, tokens_per_second: float
) -> npt.NDArray[np.int32]:
    """[3, rows], from zero. A clip's time is scaled as a float and floored at the very end."""
    size = promise.plan.grids[0]
    step = np.float32(1.0)
    if promise.plan.modality is Modality.VIDEO:
        step = np.float32(tokens_per_second) * np.float32(promise.plan.seconds_per_grid)
    times = np.floor(np.arange(size.t, dtype=np.float32) * step).astype(np.int32)
    axes = np.meshgrid(
        times,
        np.arange(size.h // merge, dtype=np.int32),
        np.arange(size.w // merge, dtype=np.int32),
        indexing="ij",
    )
    return np.stack(axes).reshape(3, -1)
