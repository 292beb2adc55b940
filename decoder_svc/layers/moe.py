"""A mixture of experts: a router, the experts of this rank, and those every token passes through.

Tokens are sorted by expert and each expert multiplies its own stretch: one grouped product on a
GPU, one product an expert elsewhere. Experts are spread over the ranks of an expert-parallel group
and cut over the rest of the tensor-parallel ones; every rank sees all tokens and adds up its part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from chiasm.kernels.activation import silu_and_mul
from decoder_svc.config.from_hf import ExpertsConfig
from decoder_svc.layers.mlp import GatedMLP
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.tp import all_reduce

Products: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


class Router(nn.Module):
    """Scores every expert for a token and chooses some; replicated on every rank."""

    def __init__(self, config: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        self._config = config
        size = (config.num_experts, hidden_size)
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.correction: nn.Parameter | None = None
        if config.sigmoid:
            self.correction = nn.Parameter(torch.empty(config.num_experts), requires_grad=False)

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads the weight and, where there is one, the correction."""
        reader.full(f"{name}.weight", self.weight)
        if self.correction is not None:
            reader.full(f"{name}.e_score_correction_bias", self.correction)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] to experts [T, top_k] and their weights, float32 [T, top_k]."""
        config = self._config
        if self.correction is None:
            scores = F.linear(hidden, self.weight).softmax(dim=-1, dtype=torch.float32)
            weights, chosen = scores.topk(config.top_k, dim=-1)
        else:
            scores = F.linear(hidden.float(), self.weight.float()).sigmoid()
            ranked = self._best_groups(scores + self.correction.float())
            chosen = ranked.topk(config.top_k, dim=-1).indices
            weights = scores.gather(1, chosen)
        if config.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights * config.scale

    def _best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """Experts outside the best groups, by the sum of a group's two best, cannot be chosen."""
        config = self._config
        if config.num_groups == 1:
            return ranked
        grouped = ranked.unflatten(1, (config.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.top_groups, dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        left: torch.Tensor = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf"))
        return left.flatten(1)


class Experts(nn.Module):
    """The experts of this rank: whole ones, or its columns of each.

    Raises:
        ValueError: Experts or their inner width do not divide evenly over the ranks.
    """

    def __init__(self, config: ExpertsConfig, hidden_size: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self._own = mesh.experts(config.num_experts)
        self._shard = mesh.split_expert(config.intermediate_size)
        count, width = len(self._own), len(self._shard)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(count, hidden_size, width), requires_grad=False)

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads the experts' parts, one by one or out of fused tensors: whole ones at once."""
        width = len(self._shard)
        if width == self._shard.of:
            joined = ((f"{name}.gate_up_proj", self.gate_up), (f"{name}.down_proj", self.down))
            if all(reader.experts(stored, self._own, target) for stored, target in joined):
                return
        for place, expert in enumerate(self._own):
            for half, part in enumerate(("gate_proj", "up_proj")):
                target = self.gate_up[place, half * width : (half + 1) * width]
                reader.rows(f"{name}.{expert}.{part}.weight", self._shard, target)
            reader.columns(f"{name}.{expert}.down_proj.weight", self._shard, self.down[place])

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden], experts and weights [T, top_k] to this rank's part of the sum."""
        top_k, own = chosen.shape[1], self._own
        # Experts of other ranks sort behind the last of ours and are left out of every product.
        local = torch.where(
            (chosen >= own.start) & (chosen < own.stop), chosen - own.start, len(own)
        )
        sorted_, order = local.flatten().sort(stable=True)
        ends = torch.searchsorted(
            sorted_, torch.arange(len(own), device=hidden.device), right=True, out_int32=True
        )
        picked = hidden.index_select(0, order // top_k)
        given = _products(picked)(picked, self.gate_up, self.down, ends)
        ours = (sorted_ < len(own)).unsqueeze(-1)
        scaled = given.float() * weights.flatten().index_select(0, order).unsqueeze(-1)
        scaled = torch.where(ours, scaled, 0.0)  # rows that no product wrote may hold anything
        placed = torch.empty_like(scaled).index_copy_(0, order, scaled)
        summed: torch.Tensor = placed.unflatten(0, (-1, top_k)).sum(1)
        return summed.to(hidden.dtype)


class MoE(nn.Module):
    """The block in place of a feed-forward one.

    Args:
        config: The experts.
        hidden_size: Of the model.
        mesh: The rank's place.
        eight_bits: Of shared experts; the others are multiplied out.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        mesh: ParallelMesh,
        *,
        eight_bits: bool = False,
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self.router = Router(config, hidden_size)
        self.experts = Experts(config, hidden_size, mesh)
        self.shared: GatedMLP | None = None
        if config.shared_size:
            self.shared = GatedMLP(hidden_size, config.shared_size, mesh, eight_bits=eight_bits)

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads router, experts and shared experts."""
        self.router.load(reader, f"{name}.gate")
        self.experts.load(reader, f"{name}.experts")
        if self.shared is not None:
            self.shared.load(reader, f"{name}.shared_experts")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden], complete on every rank."""
        chosen, weights = self.router(hidden)
        mixed = all_reduce(self.experts(hidden, chosen, weights), self._mesh)
        return mixed if self.shared is None else mixed + self.shared(hidden)


def _one_by_one(
    tokens: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Tokens [N, hidden] sorted by expert; expert g's are those before ends[g]."""
    out = torch.zeros_like(tokens)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            gate, up = F.linear(tokens[begin:end], gate_up[expert]).chunk(2, dim=-1)
            out[begin:end] = F.linear(F.silu(gate) * up, down[expert])
        begin = end
    return out


def _grouped(
    tokens: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The same as two grouped products. Nothing waits for the device: it can be captured."""
    joined = torch._grouped_mm(tokens, gate_up.transpose(1, 2), offs=ends)
    return torch._grouped_mm(silu_and_mul(joined), down.transpose(1, 2), offs=ends)


def _every_expert(
    tokens: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The same by asking every expert about every token: slow, but it can be captured."""
    place = torch.arange(len(tokens), device=tokens.device)
    owner = torch.searchsorted(ends, place, right=True, out_int32=True).unsqueeze(-1)
    out = torch.zeros_like(tokens)
    for expert in range(len(gate_up)):
        gate, up = F.linear(tokens, gate_up[expert]).chunk(2, dim=-1)
        mixed = F.linear(F.silu(gate) * up, down[expert])
        out = torch.where(owner == expert, mixed, out)
    return out


def _products(tokens: torch.Tensor) -> Products:
    """On a GPU only bfloat16 has grouped products; nothing there may wait for the device."""
    if not tokens.is_cuda:
        return _one_by_one
    return _grouped if tokens.dtype is torch.bfloat16 else _every_expert
