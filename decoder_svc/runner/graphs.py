"""Steps of one token a sequence as CUDA graphs: one launch a step instead of hundreds.

A graph is captured for some batch sizes; a step runs in the smallest that it fits in, and rows
beyond it stand for no sequence. What changes from step to step is one small array, copied before.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chiasm.kernels.paged_decode import Lookup
from decoder_svc.attention.base import AttentionBackend, DecodeStep
from decoder_svc.engine.messages import NO_PAGE, PENDING
from decoder_svc.models.stage import DecoderStage
from decoder_svc.runner.rows import Ints
from decoder_svc.runner.seats import SeatTable
from decoder_svc.sampling.drawn import Drawn
from decoder_svc.sampling.greedy import Greedy
from decoder_svc.staging import stage

_SMALL = (1, 2, 4, 8)
_STEP = 16


def graph_sizes(most: int) -> tuple[int, ...]:
    """The batch sizes to capture for batches of up to `most` sequences."""
    sizes = [size for size in (*_SMALL, *range(_STEP, most + 1, _STEP)) if size < most]
    return (*sizes, most)


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What a decode step leaves on the device; overwritten by the next of its size. S sequences."""

    hidden: torch.Tensor
    """[S, hidden]: behind the stage's last layer."""
    logits: torch.Tensor | None
    """[S, rows] of this rank's part of the vocabulary, on the last stage."""
    drawn: Drawn | None
    """The likeliest tokens, on the last stage; the seats have them already."""

    def first(self, count: int) -> DecodeOutput:
        """Of the first so many sequences."""
        drawn = self.drawn and Drawn(self.drawn.tokens[:count], self.drawn.finite[:count])
        logits = None if self.logits is None else self.logits[:count]
        return DecodeOutput(self.hidden[:count], logits, drawn)


class DecodeGraph:
    """One captured batch size.

    Args:
        size: Sequences.
        model: The stage.
        attention: Its backend.
        seats: Where block tables and last tokens are.
        greedy: Draws, on the last stage.
        block_size: Tokens of a page.
    """

    def __init__(
        self,
        size: int,
        *,
        model: DecoderStage,
        attention: AttentionBackend,
        seats: SeatTable,
        greedy: Greedy | None,
        block_size: int,
    ) -> None:
        self._model, self._attention, self._seats = model, attention, seats
        self._greedy, self._block_size = greedy, block_size
        weight = next(model.parameters())
        self._numbers = torch.zeros(6, size, dtype=torch.int32, device=weight.device)
        width = model.config.hidden_size
        self._entering = torch.zeros(size, width, dtype=weight.dtype, device=weight.device)
        self._graph = torch.cuda.CUDAGraph()
        self._output: DecodeOutput | None = None

    def capture(self, pool: Any) -> None:
        """Runs the step once for real, then records it. `pool` is the memory graphs share.

        The record is launched once, too: what time and memory a first launch takes would otherwise
        be taken in the middle of answers.
        """
        self._numbers.copy_(stage(self._empty(), self._numbers.device))
        self._step()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = self._step()
        self._graph.replay()

    def replay(self, columns: Ints, hidden: torch.Tensor | None) -> DecodeOutput:
        """Runs the step.

        Args:
            columns: int32 [6, S], see `DecodeRows`.
            hidden: [S, hidden] from the stage before; None on the first.
        """
        padded = self._empty()
        count = columns.shape[1]
        padded[:, :count] = columns
        self._numbers.copy_(stage(padded, self._numbers.device))
        if hidden is not None:
            self._entering[:count].copy_(hidden)
        self._graph.replay()
        assert self._output is not None, "captured before"
        return self._output.first(count)

    def _empty(self) -> np.ndarray:
        """Rows that stand for no sequence."""
        spare = (0, self._seats.spare_seat, -1, 0, NO_PAGE, 0)
        return np.repeat(np.array(spare, dtype=np.int32)[:, None], self._numbers.shape[1], axis=1)

    def _step(self) -> DecodeOutput:
        given, seat, start, position, page_at, page = self._numbers
        row = seat.long()
        tables = self._seats.tables
        where = torch.where(page_at == NO_PAGE, self._seats.num_pages, page_at)
        tables.index_put_((row, where.long()), page)
        place = start.clamp(min=0)
        block = tables[row, (place // self._block_size).long()]
        slots = block.long() * self._block_size + place % self._block_size
        slots = slots.masked_fill(start < 0, -1)
        self._attention.plan_decode(DecodeStep(Lookup(tables, seat, start + 1), slots))
        hidden = self._entering
        if self._model.mesh.is_first_stage:
            last = self._seats.last_tokens.index_select(0, row)
            ids = torch.where(given == PENDING, last, given)
            hidden = self._model.embed(ids, None)
        hidden = self._model(hidden, position.expand(3, -1), self._attention)
        if not self._model.mesh.is_last_stage:
            return DecodeOutput(hidden, None, None)
        assert self._greedy is not None, "the last stage draws"
        logits = self._model.local_logits(hidden)
        drawn = self._greedy.draw(logits)
        self._seats.note(row, drawn.tokens)
        return DecodeOutput(hidden, logits, drawn)


class DecodeGraphs:
    """All sizes of one rank.

    Args:
        sizes: Of batches, ascending.
        model: The stage.
        attention: A backend that can be captured.
        seats: Where block tables and last tokens are.
        greedy: Draws, on the last stage.
        block_size: Tokens of a page.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        *,
        model: DecoderStage,
        attention: AttentionBackend,
        seats: SeatTable,
        greedy: Greedy | None,
        block_size: int,
    ) -> None:
        self._sizes = sizes
        self._graphs = {
            size: DecodeGraph(
                size,
                model=model,
                attention=attention,
                seats=seats,
                greedy=greedy,
                block_size=block_size,
            )
            for size in sizes
        }

    @torch.inference_mode()
    def capture(self) -> None:
        """Records all sizes, the largest first: the others find memory that it has used."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._graphs[size].capture(pool)

    @property
    def most(self) -> int:
        """The largest batch."""
        return self._sizes[-1]

    def replay(self, columns: Ints, hidden: torch.Tensor | None) -> DecodeOutput:
        """Runs a step.

        Args:
            columns: int32 [6, S], see `DecodeRows`.
            hidden: [S, hidden] from the stage before; None on the first.
        """
        size = self._sizes[bisect_left(self._sizes, columns.shape[1])]
        return self._graphs[size].replay(columns, hidden)
