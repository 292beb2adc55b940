"""What a rank keeps between steps, by seat: block tables, and the token that each seat drew last.

Steps say only what is new. A seat's last token lives on the device: the next step may use it before
the host has seen it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from decoder_svc.engine.messages import NO_PAGE, PENDING, PlannedSequence
from decoder_svc.runner.rows import Ints
from decoder_svc.staging import stage


class SeatTable:
    """Owns the state of all seats of one rank.

    Args:
        num_seats: Sequences in the batch at once.
        num_pages: Most pages of one sequence.
        device: Where steps run.
    """

    def __init__(self, num_seats: int, num_pages: int, device: torch.device) -> None:
        self.spare_seat = num_seats
        """Rows of a padded batch that stand for no sequence write here."""
        self.num_pages = num_pages
        self._device = device
        self._host = np.zeros((num_seats, num_pages), dtype=np.int32)
        # One row and one column more, for rows of a padded batch to write to.
        self.tables = torch.zeros(num_seats + 1, num_pages + 1, dtype=torch.int32, device=device)
        """[seats + 1, pages + 1] int32: page ids."""
        self.last_tokens = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)
        """[seats + 1] int64: what each seat drew last."""

    def learn(self, sequences: Sequence[PlannedSequence]) -> None:
        """Takes in the pages that a step is the first to tell of, on the host alone."""
        for sequence in sequences:
            if sequence.block_table:
                first = sequence.first_block
                end = first + len(sequence.block_table)
                self._host[sequence.seat, first:end] = sequence.block_table

    def learn_pages(self, seats: Ints, numbers: Ints, pages: Ints) -> None:
        """Takes in one page a seat, unless it is NO_PAGE, on the host alone; all [S]."""
        new = numbers != NO_PAGE
        self._host[seats[new], numbers[new]] = pages[new]

    def place(self, sequences: Sequence[PlannedSequence]) -> None:
        """Puts the pages that a step is the first to tell of on the device."""
        if self._device.type == "cpu":  # backends there are given the host's rows with each step
            return
        news = [s for s in sequences if s.block_table]
        if not news:
            return
        counts = [len(s.block_table) for s in news]
        entries = np.empty((3, sum(counts)), dtype=np.int32)
        entries[0] = np.repeat([s.seat for s in news], counts)
        at = 0
        for sequence, count in zip(news, counts, strict=True):
            entries[1, at : at + count] = np.arange(count) + sequence.first_block
            entries[2, at : at + count] = sequence.block_table
            at += count
        rows, columns, pages = stage(entries, self._device)
        self.tables.index_put_((rows, columns), pages)

    def tables_of(self, seats: npt.NDArray[np.int64], num_pages: int) -> npt.NDArray[np.int32]:
        """[S, num_pages]: the first pages of these seats."""
        return self._host[seats, :num_pages]

    def fill_in(self, token_ids: torch.Tensor, sequences: Sequence[PlannedSequence]) -> None:
        """Replaces, in the ids of a step laid end to end, those the host does not know."""
        lengths = [len(s.token_ids) for s in sequences]
        ends = np.cumsum(lengths)
        unknown = [i for i, s in enumerate(sequences) if s.token_ids == (PENDING,)]
        if unknown:
            at = stage(ends[unknown] - 1, self._device)
            seats = stage(np.array([sequences[i].seat for i in unknown]), self._device)
            token_ids.index_copy_(0, at, self.last_tokens.index_select(0, seats))

    def note(self, seats: torch.Tensor, tokens: torch.Tensor) -> None:
        """Remembers what seats [S] drew; `tokens` [S]."""
        self.last_tokens.index_copy_(0, seats, tokens)
