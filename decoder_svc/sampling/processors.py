"""What changes logits before a token is drawn: masks, bias, penalties, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from decoder_svc.sampling.params import Draw

_OUT = float("-inf")


def apply_bias(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Adds each request's logit_bias, in place."""
    for row, draw in enumerate(draws):
        if draw.params.logit_bias:
            ids, values = zip(*draw.params.logit_bias, strict=True)
            index = torch.tensor(ids, device=logits.device)
            logits[row].index_add_(0, index, torch.tensor(values, device=logits.device))


def apply_penalties(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Repetition (prompt and answer; CTRL, section 4.1), presence, frequency (answer), in place."""
    for row, draw in enumerate(draws):
        params = draw.params
        if not params.needs_history:
            continue
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*draw.prompt_ids, *draw.output_ids}), device=logits.device)
            values = logits[row, seen]
            factor = params.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / factor, values * factor)
        if draw.output_ids and (params.presence_penalty or params.frequency_penalty):
            counts = Counter(draw.output_ids)
            ids = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device)
            logits[row, ids] -= params.presence_penalty + params.frequency_penalty * times


def apply_masks(logits: torch.Tensor, draws: Sequence[Draw], masked: torch.Tensor) -> None:
    """Takes out ids only prompts may hold, and stop ids until min_tokens is reached, in place."""
    logits.index_fill_(1, masked, _OUT)
    for row, draw in enumerate(draws):
        params = draw.params
        held = draw.position < params.min_tokens and not params.grammar  # whose mask holds it back
        if held and params.stop_token_ids:
            stops = torch.tensor(params.stop_token_ids, device=logits.device)
            logits[row].index_fill_(0, stops, _OUT)


def apply_grammar(logits: torch.Tensor, rows: Sequence[int], bits: torch.Tensor) -> None:
    """Takes out what grammars do not allow, in place.

    Args:
        logits: [S, vocab].
        rows: Those with a grammar.
        bits: int32 [rows, ceil(vocab / 32)]: see `GrammarMasks.fill`.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(~allowed.to(logits.device), _OUT)
