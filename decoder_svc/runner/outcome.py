"""What comes of a step: at once where it ran on the CPU, after a while where it runs on a GPU."""

from __future__ import annotations

import torch

from decoder_svc.engine.messages import StepResult
from decoder_svc.sampling.drawn import Drawn


class Outcome:
    """The draws of a step on the rank that samples.

    Args:
        step: Its number.
        drawn: What it drew, on the device; None when no chunk ended its sequence.
        device: Where it runs.
    """

    def __init__(self, step: int, drawn: Drawn | None, device: torch.device) -> None:
        self._step = step
        self._drawn = None if drawn is None else drawn.to_host()
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    @property
    def is_known(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or self._done.query()

    def wait(self) -> StepResult:
        """The result; waits until the device has computed it."""
        if self._done is not None:
            self._done.synchronize()
        if self._drawn is None:
            return StepResult(self._step)
        if (ids := self._drawn.plain_ids()) is not None:
            return StepResult(self._step, token_ids=ids)
        return StepResult(self._step, self._drawn.results())
