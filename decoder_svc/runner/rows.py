"""Who is in a step, as arrays, whichever way the plan tells it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from decoder_svc.engine.messages import PENDING, DecodeRows, StepPlan

Ints = npt.NDArray[np.int32]


def columns_of(rows: DecodeRows) -> Ints:
    """int32 [6, S], see `DecodeRows`; shared with the message, not to be written to."""
    return np.frombuffer(rows.numbers, dtype=np.int32).reshape(6, -1)


def drawing_seats(plan: StepPlan) -> npt.NDArray[np.int64]:
    """[draws]: the seats that draw a token, in the order of the plan."""
    return _joined(plan, [s.seat for s in plan.sequences if s.draw is not None], pending=False)


def pending_seats(plan: StepPlan) -> npt.NDArray[np.int64]:
    """[P]: the seats whose token the host did not know when it planned."""
    return _joined(plan, [s.seat for s in plan.sequences if s.token_ids == (PENDING,)])


def _joined(plan: StepPlan, others: list[int], *, pending: bool = True) -> npt.NDArray[np.int64]:
    """The seats told in columns, or with `pending` those whose token is, and these."""
    seats = np.array(others, dtype=np.int64)
    if plan.decodes is None:
        return seats
    columns = columns_of(plan.decodes)
    told = columns[1][columns[0] == PENDING] if pending else columns[1]
    return np.concatenate((told, seats), dtype=np.int64)
