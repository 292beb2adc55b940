"""One training step: pixels to loss to update, replayed as a CUDA graph once its shape was seen.

Launching the kernels one by one costs the host more time than the device needs to run them.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model import spec
from tools.demo_model.batches import Batch, Shape
from tools.demo_model.encode import IGNORED
from tools.demo_model.model import DemoModel, Grid
from tools.demo_model.tasks import TASKS

NOISE = 0.06


@functools.cache
def _normal(device: str) -> tuple[Tensor, Tensor]:
    return torch.tensor(spec.IMAGE_MEAN, device=device), torch.tensor(spec.IMAGE_STD, device=device)


def patches_of(pixels: Tensor, *, noise: float) -> tuple[Tensor, Grid]:
    """Normalise [B, T, H, W, 3] bytes and cut them in processor order; `noise` is per picture."""
    x = pixels.float() / 255
    if noise > 0:
        strength = noise * torch.rand(x.shape[0], 1, 1, 1, 1, device=x.device).square()
        x = (x + strength * torch.randn_like(x)).clamp(0, 1)
    mean, std = _normal(str(x.device))
    x = (x - mean) / std
    if x.shape[1] == 1:
        x = x.expand(-1, spec.TEMPORAL_PATCH, -1, -1, -1)
    batch, frames, height, width, _ = x.shape
    grid = (frames // spec.TEMPORAL_PATCH, height // spec.PATCH, width // spec.PATCH)
    merged = (
        grid[1] // spec.MERGE,
        spec.MERGE,
        spec.PATCH,
        grid[2] // spec.MERGE,
        spec.MERGE,
        spec.PATCH,
    )
    cut = x.reshape(batch, grid[0], spec.TEMPORAL_PATCH, *merged, 3)
    #          b  t  rows cols  mr mc  channel, time, y, x
    cut = cut.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
    return cut.reshape(batch, grid[0] * grid[1] * grid[2], -1), grid


class Meter:
    """Sums loss and exact answers per task on the device, so that no step waits."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, len(TASKS), device=device)

    def add(self, batch: Batch, losses: Tensor, right: Tensor) -> None:
        """Count one batch; an answer is exact when all tokens of all its turns are right."""
        learned = (batch.targets != IGNORED).float()
        rows = batch.places // batch.ids.shape[1]
        token_tasks = batch.tasks[rows]
        wrong = torch.zeros(batch.ids.shape[0], device=losses.device)
        wrong.index_add_(0, rows, learned * (~right).float())
        self._sums[0].index_add_(0, token_tasks, losses.detach().float())
        self._sums[1].index_add_(0, token_tasks, learned)
        self._sums[2].index_add_(0, batch.tasks, (wrong == 0).float())
        self._sums[3].index_add_(0, batch.tasks, torch.ones_like(wrong))

    def read(self) -> dict[str, tuple[float, float, int]]:
        """Give (loss per token, share of exact answers, answers) per task and start again."""
        loss, tokens, exact, rows = self._sums.tolist()
        self._sums.zero_()
        return {
            task: (
                loss[index] / max(tokens[index], 1),
                exact[index] / max(rows[index], 1),
                int(rows[index]),
            )
            for index, task in enumerate(TASKS)
        }


def forward(model: DemoModel, batch: Batch, *, noise: float) -> tuple[Tensor, Tensor]:
    """Give the loss of every learned token and whether each is predicted right."""
    pictures = [patches_of(pixels, noise=noise) for pixels in batch.pixels]
    hidden = model(batch.ids, batch.positions, pictures, batch.slots)
    logits = model.logits(hidden.flatten(0, 1).index_select(0, batch.places)).float()
    losses = F.cross_entropy(logits, batch.targets, reduction="none", ignore_index=IGNORED)
    return losses, logits.argmax(-1) == batch.targets


class Stepper:
    """Takes steps; the first of each shape runs as it is and is then captured."""

    def __init__(
        self, model: DemoModel, optimizer: torch.optim.Optimizer, meter: Meter, device: torch.device
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._meter = meter
        self._device = device
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # One stream for all captures: the pool's blocks are only reused within a stream.
        self._side = torch.cuda.Stream() if device.type == "cuda" else None

    def _work(self, batch: Batch) -> None:
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._pool is not None, cache_enabled=False
        ):
            losses, right = forward(self._model, batch, noise=NOISE)
        loss = losses.sum() / (batch.targets != IGNORED).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._meter.add(batch, losses, right)

    @property
    def num_graphs(self) -> int:
        """Count the captured shapes."""
        return len(self._graphs)

    def take(self, batch: Batch) -> None:
        """Take one step on a batch."""
        if self._pool is None:
            self._work(batch)
        elif batch.shape in self._graphs:
            graph, own = self._graphs[batch.shape]
            for kept, given in zip(own.tensors(), batch.tensors(), strict=True):
                kept.copy_(given)
            graph.replay()
        else:
            self._capture(batch)

    def _capture(self, batch: Batch) -> None:
        own = batch.clone()
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._work(own)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            self._work(own)
        self._graphs[batch.shape] = (graph, own)
