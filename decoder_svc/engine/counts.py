"""What is counted of sequences, each count in an array: a step of decoding is added up at once.

| prompt ................... | output .................... |
| tokens ................................................. |
| computed ......... | in flight ......... | not scheduled |
| scheduled ............................. |
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_NUM_COUNTS = 18


class Counts:
    """Of so many sequences, one at each index; those in the batch at the number of their seat.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self._table = np.zeros((_NUM_COUNTS, size), dtype=np.int64)
        # What never changes.
        self.prompt, self.most, self.delta, self.choice = self._table[:4]
        """Tokens of the prompt; of prompt and output at most; the rest as elsewhere."""
        self.is_plain, self.needs_host, self.has_siblings = self._table[4:7]
        """As `Request` has it; whether the request has other choices."""
        # What does.
        self.tokens, self.scheduled, self.in_flight, self.drawing = self._table[7:11]
        """Of prompt and output; the rest as `Sequence` has it."""
        self.pages, self.told, self.newest_page = self._table[11:14]
        """Pages it has, those that ranks know of, and the last one's id."""
        self.last_step, self.is_heard, self.is_over = self._table[14:17]
        """As `Sequence` has it; whether it has drawn a token in this life, and finished."""
        self.stalled_at = self._table[17]
        """The receiver's revision at which its next row was missing; 0 = at none."""

    def copy(self, at: int, source: Counts, source_at: int) -> None:
        """Takes over the counts of a sequence."""
        self._table[:, at] = source._table[:, source_at]

    def decodes(self, at: Ints) -> Bools:
        """Whether all there is to schedule of these [S] is the token that each sampled last."""
        scheduled = self.scheduled[at]
        left = self.tokens[at] + self.drawing[at] - scheduled
        found: Bools = (left == 1) & (scheduled >= self.prompt[at])
        return found

    def may_draw(self, at: Ints, *, ahead: bool, latest: int) -> Bools:
        """Whether these [S] may draw another token: never two of a sequence at once.

        Args:
            at: Of sequences that decode.
            ahead: Whether one may, before the token it drew last is known here.
            latest: If so, the last step that it may be part of.
        """
        drawing = self.drawing[at]
        may: Bools = drawing == 0
        if ahead:
            follows = (drawing == 1) & (self.last_step[at] <= latest)
            follows &= (self.tokens[at] + drawing < self.most[at]) & (self.needs_host[at] == 0)
            may |= follows
        return may

    def begin(self, at: Ints) -> None:
        """These [S], each once, compute a token and draw the next."""
        self.scheduled[at] += 1
        self.in_flight[at] += 1
        self.drawing[at] += 1

    def end(self, at: Ints, *, counts: bool) -> None:
        """That is over; with `counts` the token's K and V are in pages."""
        self.in_flight[at] -= 1
        self.drawing[at] -= 1
        if not counts:
            self.scheduled[at] -= 1

    def num_left(self, at: Ints) -> Ints:
        """Tokens to schedule before the next one can be sampled; [S]."""
        left: Ints = self.tokens[at] + self.drawing[at] - self.scheduled[at]
        return left

    def num_pages_missing(self, at: Ints, page_size: int) -> int:
        """Pages to come for the known tokens and one more, of all of these [S]."""
        wanted = -(-(self.tokens[at] + self.drawing[at] + 1) // page_size)
        return int(np.maximum(wanted - self.pages[at], 0).sum())
