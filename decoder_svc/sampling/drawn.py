"""What a step drew, while it is on the device and once it has come to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoder_svc.sampling.params import NO_TOKEN, Sampled


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The model's own logprobs, of the rows that asked for them. R rows, K the most wanted."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    """How many of the K each row wants."""
    own: torch.Tensor
    """[R]: of the token drawn."""
    ids: torch.Tensor
    """[R, K]: the likeliest first."""
    values: torch.Tensor
    """[R, K]"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token per row of logits; S rows."""

    tokens: torch.Tensor
    """[S] int64"""
    finite: torch.Tensor
    """[S] bool: whether the row's logits were numbers, all of them."""
    logprobs: Logprobs | None = None

    def to_host(self) -> Drawn:
        """The same in host memory; from a GPU the copies are started, not waited for."""
        told = self.logprobs
        if told is not None:
            moved = (_to_host(part) for part in (told.own, told.ids, told.values))
            told = Logprobs(told.rows, told.counts, *moved)
        return Drawn(_to_host(self.tokens), _to_host(self.finite), told)

    def plain_ids(self) -> tuple[int, ...] | None:
        """The ids, when there is nothing else to tell. In host memory, as for `results`."""
        if self.logprobs is not None or not all(self.finite.tolist()):
            return None
        ids = tuple(self.tokens.tolist())
        return None if NO_TOKEN in ids else ids

    def results(self) -> tuple[Sampled, ...]:
        """As plain values; everything is in host memory, copies have ended."""
        tokens, states = self.tokens.tolist(), self.finite.tolist()
        results = [Sampled(t, f) for t, f in zip(tokens, states, strict=True)]
        if self.logprobs is not None:
            self._tell(self.logprobs, results)
        return tuple(results)

    def _tell(self, told: Logprobs, results: list[Sampled]) -> None:
        columns = (told.own.tolist(), told.ids.tolist(), told.values.tolist())
        rows: Sequence[tuple[int, int, float, list[int], list[float]]] = list(
            zip(told.rows, told.counts, *columns, strict=True)
        )
        for row, count, own, ids, values in rows:
            if results[row].finite:
                token = results[row].token_id
                results[row] = Sampled(token, True, own, tuple(ids[:count]), tuple(values[:count]))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
