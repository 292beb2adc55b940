"""Which rows of requests' media have been read: the scheduler's word to the receiver."""

from __future__ import annotations

from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.request import Request, State


class MediaRows:
    """Tells the receiver which rows nobody will read any more, and which again.

    Args:
        receiver: Holds the rows.
    """

    def __init__(self, receiver: EmbeddingReceiver) -> None:
        self._receiver = receiver

    def consume(self, request: Request) -> None:
        """Rows that are in the KV cache of all its choices in the batch are not needed any more."""
        edges = [s.computed for s in request.sequences if s.state is State.RUNNING]
        if not edges:
            return
        # Parked siblings need no more than their leader: they join before it leaves what is shared.
        for item, before in request.consumed.items():
            until = request.promises[item].row_at(min(edges))
            if until > before:
                request.consumed[item] = until
                self._receiver.consume(request.request_id, item, until)

    def needed_again(self, request: Request, computed: int) -> dict[int, int]:
        """Items of which rows were used and given up, but pages that held the result are gone.

        Args:
            request: Whose.
            computed: Tokens that it has on pages.

        Returns:
            By item, the first row that is needed.
        """
        first = {item: request.promises[item].row_at(computed) for item in request.consumed}
        return {item: row for item, row in first.items() if row < request.consumed[item]}

    def fetch_again(self, request: Request, first: dict[int, int]) -> None:
        """Items are needed from these rows on, once more."""
        request.consumed.update(first)
        self._receiver.preempt(request.request_id, first)

    def give_back(self, request: Request) -> None:
        """When none of its choices is in the batch: landed rows that wait with it leave the slab.

        Who is in the batch might need their slots, before it gives up its seat or its pages.
        """
        if any(s.state is State.RUNNING for s in request.sequences):
            return
        unused = {
            item: row
            for item, row in request.consumed.items()
            if row < request.promises[item].plan.num_rows
        }
        if unused:
            self._receiver.preempt(request.request_id, unused)
