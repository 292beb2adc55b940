"""The place of one rank among stages and tensor-parallel peers: an argument, never a global.

Owns who holds which layers, heads, features and vocabulary rows. Knows no model and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chiasm.stages import layer_counts
from decoder_svc.parallel.one_shot import OneShotAllReduce


@dataclass(frozen=True, slots=True)
class Shard:
    """Half-open range [begin, end) of a weight's dimension of size `of` that this rank holds."""

    begin: int
    end: int
    of: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMesh:
    """Pipeline x tensor coordinates of a rank. The default is the whole model on one rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_size: int = 1
    """Groups of tensor-parallel ranks that the experts of a layer are spread over."""
    tp_group: Any = None
    """The torch.distributed group of the rank's tensor-parallel peers; None at size 1."""
    small_sum: OneShotAllReduce | None = None
    """Sums small tensors over the tensor-parallel peers; None = all go the same way."""
    return_group: Any = None
    """A group of all ranks for tokens on their way back to the first stage; None at one stage."""

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise ValueError(f"rank outside its mesh: {self}")
        if self.tp_size % self.ep_size:
            raise ValueError(f"--ep-size {self.ep_size} does not divide --tp-size {self.tp_size}")

    @property
    def is_first_stage(self) -> bool:
        """Holds the token embedding and takes rows of media in."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the final norm and the lm_head, and samples."""
        return self.pp_rank == self.pp_size - 1

    @property
    def rank(self) -> int:
        """Among all ranks: the tensor-parallel peers of a stage are neighbours."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def layers(self, num_layers: int, *, head: float = 0.0) -> range:
        """The decoder layers of this stage: contiguous, the slowest stage as fast as can be.

        Args:
            num_layers: Layers of the model.
            head: What the last stage does besides, as a number of layers.

        Raises:
            ValueError: A stage would have no layer.
        """
        counts = layer_counts(num_layers, self.pp_size, head)
        begin = sum(counts[: self.pp_rank])
        return range(begin, begin + counts[self.pp_rank])

    def split(self, size: int, *, unit: int = 1, what: str = "size") -> Shard:
        """This rank's part of a dimension, in whole units (a head's width, say).

        Raises:
            ValueError: The units do not divide evenly over the tensor-parallel ranks.
        """
        units, rest = divmod(size, unit)
        if rest or units % self.tp_size:
            raise ValueError(f"{what}: {units} cannot be split over --tp-size {self.tp_size}")
        width = units // self.tp_size * unit
        return Shard(self.tp_rank * width, (self.tp_rank + 1) * width, size)

    def split_kv(self, num_kv_heads: int, head_dim: int) -> Shard:
        """This rank's KV heads, in features; fewer heads than ranks are replicated.

        Raises:
            ValueError: Neither heads over ranks nor ranks over heads divide evenly.
        """
        if num_kv_heads >= self.tp_size:
            return self.split(num_kv_heads * head_dim, unit=head_dim, what="KV heads")
        if self.tp_size % num_kv_heads:
            raise ValueError(
                f"{num_kv_heads} KV heads cannot be replicated over --tp-size {self.tp_size}"
            )
        head = self.tp_rank * num_kv_heads // self.tp_size
        return Shard(head * head_dim, (head + 1) * head_dim, num_kv_heads * head_dim)

    def experts(self, num_experts: int) -> range:
        """The experts of this rank's group.

        Raises:
            ValueError: They do not divide evenly over the groups.
        """
        count, rest = divmod(num_experts, self.ep_size)
        if rest:
            raise ValueError(
                f"{num_experts} experts cannot be spread over --ep-size {self.ep_size}"
            )
        begin = self.tp_rank // (self.tp_size // self.ep_size) * count
        return range(begin, begin + count)

    def split_expert(self, size: int) -> Shard:
        """This rank's part of the width of one of its experts.

        Raises:
            ValueError: It does not divide evenly over the ranks that share the expert.
        """
        parts = self.tp_size // self.ep_size
        if size % parts:
            raise ValueError(f"an expert's {size} columns cannot be split over {parts} ranks")
        width = size // parts
        begin = self.tp_rank % parts * width
        return Shard(begin, begin + width, size)

    def split_padded(self, size: int) -> Shard:
        """This rank's part of a vocabulary, padded so that every rank holds equally many rows."""
        width = -(-size // self.tp_size)
        return Shard(self.tp_rank * width, (self.tp_rank + 1) * width, size)
