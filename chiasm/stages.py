"""Layers of each pipeline stage: the decoder lays them out so, `chiasm check` reckons with it."""

from __future__ import annotations


def layer_counts(num_layers: int, num_stages: int, head: float) -> list[int]:
    """Layers of each stage; all but the last alike, the earlier ones take the remainder.

    Args:
        num_layers: Layers of the model.
        num_stages: Stages.
        head: What the last stage does besides, as a number of layers.

    Raises:
        ValueError: A stage would have no layer.
    """
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} pipeline stages")
    others = num_stages - 1
    if not others:
        return [num_layers]
    fair = (num_layers + head) / num_stages

    def cost(last: int) -> tuple[float, float]:
        return max(-(-(num_layers - last) // others), last + head), abs(last + head - fair)

    last = min(range(1, num_layers - others + 1), key=cost)
    base, extra = divmod(num_layers - last, others)
    return [base + (stage < extra) for stage in range(others)] + [last]
