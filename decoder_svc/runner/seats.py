"""What a rank keeps between steps, by seat: block tables, and the token that each seat drew last.

Steps say only what is new. A seat's last token lives on the device: the next step may use it before
the host has seen it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from decoder_svc.engine.messages import NO_PAGE, StepPlan
from decoder_svc.runner.rows import Ints, columns_of
from decoder_svc.staging import stage

Longs = npt.NDArray[np.int64]


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

    def learn(self, plan: StepPlan) -> Ints:
        """Takes in the pages that a step is the first to tell of, on the host alone.

        Returns:
            [3, news]: the seat, which of its pages, and the page, of each.
        """
        news = []
        if plan.decodes is not None:
            _, seats, _, _, numbers, pages = columns_of(plan.decodes)
            new = numbers != NO_PAGE
            news.append(np.stack((seats[new], numbers[new], pages[new])))
        for sequence in plan.sequences:
            if sequence.block_table:
                told = np.empty((3, len(sequence.block_table)), dtype=np.int32)
                told[0] = sequence.seat
                told[1] = np.arange(told.shape[1]) + sequence.first_block
                told[2] = sequence.block_table
                news.append(told)
        learnt: Ints = np.concatenate(news, axis=1) if news else np.empty((3, 0), dtype=np.int32)
        self._host[learnt[0], learnt[1]] = learnt[2]
        return learnt

    def place(self, news: Ints) -> None:
        """Puts the pages that a step is the first to tell of on the device: see `learn`."""
        if self._device.type == "cpu":  # backends there are given the host's rows with each step
            return
        if news.shape[1]:
            rows, columns, pages = stage(news, self._device)
            self.tables.index_put_((rows, columns), pages)

    def tables_of(self, seats: Longs, num_pages: int) -> npt.NDArray[np.int32]:
        """[S, num_pages]: the first pages of these seats."""
        return self._host[seats, :num_pages]

    def fill_in(self, token_ids: torch.Tensor, at: Longs, seats: Longs) -> None:
        """Replaces ids that the host does not know, [P] of them, by what these seats drew last."""
        if len(at):
            places, rows = stage(np.stack((at, seats)), self._device)
            token_ids.index_copy_(0, places, self.last_tokens.index_select(0, rows))

    def note(self, seats: torch.Tensor, tokens: torch.Tensor) -> None:
        """Remembers what seats [S] drew; `tokens` [S]."""
        self.last_tokens.index_copy_(0, seats, tokens)
