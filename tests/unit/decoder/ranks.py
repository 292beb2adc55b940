"""What one rank of a split model computes. Imports no transformers: ranks start in processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from decoder_svc.attention.base import AttentionBatch
from decoder_svc.attention.reference import ReferenceAttention
from decoder_svc.config import read_text_config
from decoder_svc.kv_cache.pool import KVPool
from decoder_svc.models.stage import MediaRows
from decoder_svc.parallel import ParallelMesh
from decoder_svc.runner.loading import Placement, load_stage
from decoder_svc.sampling.greedy import Greedy

CPU = Placement(torch.device("cpu"), torch.float32)
TOKENS = 12


@torch.inference_mode()
def run_stage(model_dir: Path, mesh: ParallelMesh, hidden: torch.Tensor | None) -> torch.Tensor:
    """One prompt through one rank: hidden states, or logits of every token on the last stage."""
    text = read_text_config(model_dir)
    model = load_stage(model_dir, text, mesh, CPU)
    pool = KVPool(
        text, mesh, num_blocks=4, block_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    attention = ReferenceAttention(pool)
    batch = AttentionBatch(
        np.array([0]), np.array([TOKENS]), np.array([[2, 0, 3]]), 0, np.array([0])
    )
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 12, 13, 14, 15])
    attention.plan(batch, slots)
    if hidden is None:
        rows = torch.randn(2, text.hidden_size, generator=torch.Generator().manual_seed(1))
        ids = torch.arange(40, 40 + TOKENS)
        ids[-1] = text.vocab_size - 1  # of the last rank's part
        hidden = model.embed(ids, MediaRows(torch.tensor([3, 4]), rows, text.hidden_size))
    hidden = model(hidden, torch.arange(TOKENS).expand(3, -1), attention)
    if not mesh.is_last_stage:
        return hidden
    logits = model.logits(hidden)
    greedy = Greedy(model.head.own, (7, text.vocab_size - 1), mesh=mesh, device=CPU.device)
    allowed = logits.clone()
    allowed[:, [7, text.vocab_size - 1]] = float("-inf")
    assert torch.equal(greedy.draw(model.local_logits(hidden)).tokens, allowed.argmax(-1))
    return logits


def run_rank(
    rank: int, world: int, model_dirs: Sequence[Path], rendezvous: str, target: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    mesh = ParallelMesh(tp_rank=rank, tp_size=world, tp_group=dist.group.WORLD)
    logits = [run_stage(model_dir, mesh, None) for model_dir in model_dirs]
    if rank == world - 1:
        torch.save(logits, target)
    dist.barrier()
    dist.destroy_process_group()
