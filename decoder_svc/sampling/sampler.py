"""Draws one token per row of logits. A row's outcome never depends on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chiasm.kernels.argmax import greedy
from chiasm.kernels.draw import Filters, draw_tokens
from decoder_svc.sampling.drawn import Drawn, Logprobs
from decoder_svc.sampling.grammar_masks import GrammarMasks
from decoder_svc.sampling.params import NO_TOKEN, Draw
from decoder_svc.sampling.processors import (
    apply_bias,
    apply_grammar,
    apply_masks,
    apply_penalties,
)
from decoder_svc.sampling.random import uniforms
from decoder_svc.staging import stage


class Sampler:
    """Runs on the last pipeline stage.

    Args:
        masked_token_ids: Ids that are never drawn, whatever a bias says.
        device: Where the logits are.
        grammars: Masks of draws with a grammar; None = there are none.
    """

    def __init__(
        self,
        masked_token_ids: Sequence[int],
        *,
        device: torch.device,
        grammars: GrammarMasks | None = None,
    ) -> None:
        self._grammars = grammars
        self.masked = torch.tensor(masked_token_ids, dtype=torch.int64, device=device)
        """[m] int64, on the device."""

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> Drawn:
        """Logits [S, vocab] of any float dtype, and one draw per row. Waits for no GPU."""
        if all(draw.params.is_plain for draw in draws):
            return self._likeliest(logits)
        raw = logits.float()
        finite = raw.isfinite().all(dim=-1)
        told = any(draw.params.top_logprobs is not None for draw in draws)
        shaped = raw.clone() if told or raw is logits else raw
        apply_penalties(shaped, draws)
        apply_bias(shaped, draws)
        apply_masks(shaped, draws, self.masked)
        stuck = self._apply_grammars(shaped, draws)
        chosen = shaped.argmax(dim=-1)
        drawn = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            some = [draws[row] for row in drawn]
            chosen[rows] = _draw(shaped.index_select(0, rows), some)
        logprobs = self._logprobs(raw, draws, chosen)
        if stuck:
            chosen[torch.tensor(stuck, device=logits.device)] = NO_TOKEN
        return Drawn(chosen, finite, logprobs)

    def _likeliest(self, logits: torch.Tensor) -> Drawn:
        if logits.is_cuda:
            tokens, _, finite = greedy(logits, self.masked)
            return Drawn(tokens, finite)
        finite = logits.isfinite().all(dim=-1)
        allowed = logits.index_fill(1, self.masked, float("-inf"))
        return Drawn(allowed.argmax(dim=-1), finite)

    def _apply_grammars(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Masks in place; returns the rows whose grammar leaves nothing, which are left alone."""
        rows = [row for row, draw in enumerate(draws) if draw.params.grammar]
        if self._grammars is None:
            return rows
        bits = self._grammars.fill([draws[row] for row in rows])
        goes_on = [bool(row.any()) for row in bits]
        live = [row for row, goes in zip(rows, goes_on, strict=True) if goes]
        if live:
            apply_grammar(logits, live, torch.from_numpy(bits[goes_on]).to(logits.device))
        return [row for row, goes in zip(rows, goes_on, strict=True) if not goes]

    def _logprobs(
        self, raw: torch.Tensor, draws: Sequence[Draw], chosen: torch.Tensor
    ) -> Logprobs | None:
        """Logprobs are the model's own: before bias, penalties and temperature."""
        wanted = [(row, draw.params.top_logprobs) for row, draw in enumerate(draws)]
        asked = [(row, count) for row, count in wanted if count is not None]
        if not asked:
            return None
        rows, counts = zip(*asked, strict=True)
        index = torch.tensor(rows, device=raw.device)
        own = raw.index_select(0, index).index_fill_(1, self.masked, float("-inf"))
        logprobs = own.log_softmax(dim=-1)
        values, ids = logprobs.topk(max(counts))
        tokens = chosen.index_select(0, index).unsqueeze(1)
        return Logprobs(rows, counts, logprobs.gather(1, tokens).squeeze(1), ids, values)


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """One id per row by inverting the cumulative distribution at the row's random number."""
    params = [d.params for d in draws]
    table = np.array(
        [
            [max(p.temperature, 1e-5) for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            uniforms(
                [p.seed for p in params], [d.choice for d in draws], [d.position for d in draws]
            ),
        ]
    )
    *filters, numbers = stage(table, logits.device)
    return draw_tokens(logits, Filters(*filters), numbers)
