"""The slab in shared memory, pinned by a rank that has a GPU."""

from __future__ import annotations

import pytest
import torch

from decoder_svc.embeddings.slab import Slab
from decoder_svc.runner.host_rows import HostRows

pytestmark = pytest.mark.gpu


def test_rows_of_a_pinned_slab_are_copied_before_take_returns() -> None:
    with Slab(1 << 20) as slab:
        rows = torch.frombuffer(slab.view(), dtype=torch.bfloat16).view(-1, 128)
        rows.copy_(torch.arange(len(rows))[:, None] % 251)
        wanted = torch.tensor([7, 8, 9, 3, 4000, 4001])
        expected = rows[wanted].clone()
        host = HostRows(rows, torch.device("cuda"))
        assert rows.is_pinned()
        taken = host.take(wanted, torch.bfloat16)
        rows.zero_()  # the slots are somebody else's now
        assert torch.equal(taken.cpu(), expected)
        host.close()
        assert not rows.is_pinned()
        del rows
