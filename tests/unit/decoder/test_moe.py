"""A mixture of experts gives what its formula says, however its products are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from decoder_svc.config.from_hf import ExpertsConfig
from decoder_svc.layers import moe
from decoder_svc.parallel.mesh import ParallelMesh

HIDDEN, WIDTH, EXPERTS, TOP = 16, 24, 8, 3


def layer(mesh: ParallelMesh | None = None, **changes: object) -> moe.MoE:
    config = ExpertsConfig(num_experts=EXPERTS, top_k=TOP, intermediate_size=WIDTH, **changes)  # type: ignore[arg-type]
    made = moe.MoE(config, HIDDEN, mesh or ParallelMesh())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.4)
    return made


def by_formula(block: moe.MoE, token: torch.Tensor) -> torch.Tensor:
    """One token, softmax scores."""
    scores = F.linear(token, block.router.weight).softmax(-1)
    weights, chosen = scores.topk(TOP)
    total = torch.zeros(HIDDEN)
    for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
        gate, up = (block.experts.gate_up[expert] @ token).chunk(2)
        total += weight * (block.experts.down[expert] @ (F.silu(gate) * up))
    return total


@torch.inference_mode()
def test_tokens_get_the_weighted_sum_of_their_experts() -> None:
    block = layer()
    tokens = torch.randn(13, HIDDEN)
    expected = torch.stack([by_formula(block, token) for token in tokens])
    torch.testing.assert_close(block(tokens), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(block(tokens[4:5]), expected[4:5], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_every_way_of_multiplying_is_the_same() -> None:
    experts = layer().experts
    tokens = torch.randn(11, HIDDEN)
    for ends in ([2, 2, 5, 5, 5, 8, 9, 11], [0] * 7 + [6], [0] * 8):
        edges = torch.tensor(ends, dtype=torch.int32)
        arguments = (tokens, experts.gate_up, experts.down, edges)
        plain, masked = moe._one_by_one(*arguments), moe._every_expert(*arguments)
        torch.testing.assert_close(masked, plain, atol=1e-6, rtol=1e-5)
        grouped = moe._grouped(*(t.bfloat16() for t in arguments[:3]), edges).float()
        used = ends[-1]
        torch.testing.assert_close(grouped[:used], plain[:used], atol=0.3, rtol=0.1)


@torch.inference_mode()
@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (2, 2), (4, 2), (8, 8)])
def test_parts_of_ranks_add_up(tp_size: int, ep_size: int) -> None:
    whole = layer().experts
    tokens = torch.randn(9, HIDDEN)
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(9)])
    weights = torch.rand(9, TOP)
    total = torch.zeros(9, HIDDEN)
    for rank in range(tp_size):
        mesh = ParallelMesh(tp_rank=rank, tp_size=tp_size, ep_size=ep_size)
        part = layer(mesh).experts
        own, shard = mesh.experts(EXPERTS), mesh.split_expert(WIDTH)
        gate, up = whole.gate_up[own.start : own.stop].chunk(2, dim=1)
        cut = slice(shard.begin, shard.end)
        part.gate_up.copy_(torch.cat((gate[:, cut], up[:, cut]), dim=1))
        part.down.copy_(whole.down[own.start : own.stop, :, cut])
        total += part(tokens, chosen, weights)
    torch.testing.assert_close(total, whole(tokens, chosen, weights), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_groups_and_corrections_choose_but_do_not_weigh() -> None:
    router = layer(sigmoid=True, num_groups=4, top_groups=2, scale=2.5).router
    tokens = torch.randn(64, HIDDEN)
    chosen, weights = router(tokens)
    scores = F.linear(tokens, router.weight).sigmoid()
    picked = scores.gather(1, chosen)
    torch.testing.assert_close(weights, 2.5 * picked / picked.sum(1, keepdim=True))
    groups = (chosen // 2).tolist()
    assert all(len(set(row)) <= 2 for row in groups)
    assert router.correction is not None
    router.correction[:] = torch.tensor([9.0, 9.0, 9.0, 9.0, 0.0, 0.0, 0.0, 0.0])
    chosen, _ = router(tokens)
    assert set(chosen.flatten().tolist()) <= {0, 1, 2, 3}
