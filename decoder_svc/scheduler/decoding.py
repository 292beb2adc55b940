"""Who of the batch may decode in the next step: looked up for everybody at once."""

from __future__ import annotations

import numpy as np

from decoder_svc.engine.counts import Counts, Ints
from decoder_svc.engine.request import Sequence
from decoder_svc.scheduler.budget import Limits
from decoder_svc.scheduler.policy import Queue


def ready_to_decode(
    running: Queue, counts: Counts, limits: Limits, *, latest: int, starved: Sequence | None
) -> tuple[Ints, int]:
    """The seats of those that may, in the order they are served, and how many of them at most.

    Args:
        running: The batch.
        counts: Of the batch.
        limits: Whether steps are planned ahead, and how many stages share the sequences.
        latest: The last step that may have drawn the token, if it is not known here.
        starved: Who found no page; whom it could have preempted must not be in flight.
    """
    at = running.seats
    decodes = counts.decodes(at)
    most = len(at)
    if limits.depth > 1:
        most = limits.share(int(np.count_nonzero((counts.in_flight[at] > 0) | decodes)))
    if starved is not None:
        decodes[running.until(starved) :] = False
    ready = at[decodes]
    return ready[counts.may_draw(ready, ahead=limits.ahead, latest=latest)], most
