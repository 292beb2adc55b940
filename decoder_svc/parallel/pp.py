"""Hidden states from the stage before and to the stage after, over torch.distributed.

Shapes follow from the step plan, which every rank has: no header travels. Every rank of a stage
holds the whole hidden states, so each sends to its opposite number and no gathering is needed.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from decoder_svc.parallel.mesh import ParallelMesh


class StageLink:
    """One rank's ends of the pipeline.

    Args:
        mesh: Where the rank is.
        hidden_size: Features of a token.
        dtype: Of hidden states.
        device: Where the stage computes.
    """

    def __init__(
        self, mesh: ParallelMesh, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._before = mesh.rank - mesh.tp_size
        self._after = mesh.rank + mesh.tp_size
        self._most_unsent = mesh.pp_size
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._unsent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def receive(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, hidden] of the same step from the stage before; waits for it."""
        hidden = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        dist.recv(hidden, src=self._before)
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Sends to the stage after, which may be busy: this stage goes on with its next step."""
        while len(self._unsent) >= self._most_unsent or (
            self._unsent and self._unsent[0][0].is_completed()
        ):
            self._unsent.popleft()[0].wait()
        work = dist.isend(hidden, dst=self._after)
        assert work is not None, "this rank is part of the group"
        self._unsent.append((work, hidden))  # the memory is the transfer's until then
