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
    if plan.decodes is not None:
        return np.asarray(columns_of(plan.decodes)[1], dtype=np.int64)
    return np.array([s.seat for s in plan.sequences if s.draw is not None], dtype=np.int64)


def pending_seats(plan: StepPlan) -> npt.NDArray[np.int64]:
    """[P]: the seats whose token the host did not know when it planned."""
    if plan.decodes is not None:
        columns = columns_of(plan.decodes)
        return np.asarray(columns[1][columns[0] == PENDING], dtype=np.int64)
    pending = [s.seat for s in plan.sequences if s.token_ids == (PENDING,)]
    return np.array(pending, dtype=np.int64)
