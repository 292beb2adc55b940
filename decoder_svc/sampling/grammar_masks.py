"""Which tokens each answer's grammar allows next: a bit mask per draw, from its output so far.

A state is only ever a short cut: it is found again by the output it has read, and one that is not
there (a replay, a preemption, another rank's life) is made anew from the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from decoder_svc.sampling.grammar import GrammarCompiler
from decoder_svc.sampling.params import Draw

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Bits = npt.NDArray[np.int32]

_IDLE_CALLS = 64  # how long a state nobody asks for is kept; it is cheap to make anew

_Key = tuple[str, int, int]


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    read: tuple[int, ...]
    used: int


class GrammarMasks:
    """Lives where tokens are drawn: on one rank of the last stage.

    Args:
        compiler: Compiles grammars; shared with whoever has checked them, if in this process.
        masked_token_ids: Ids that are never drawn.
    """

    def __init__(self, compiler: GrammarCompiler, masked_token_ids: Sequence[int] = ()) -> None:
        self._compiler = compiler
        self._words = (compiler.vocab_size + 31) // 32
        self._never = self._bits(masked_token_ids)
        self._executor: LLExecutor | None = None
        self._states: dict[_Key, list[_State]] = {}
        self._calls = 0

    @property
    def num_states(self) -> int:
        """States at hand."""
        return sum(map(len, self._states.values()))

    def fill(self, draws: Sequence[Draw]) -> Bits:
        """What each draw may be: bit `i % 32` of word `i // 32` stands for token `i`.

        Args:
            draws: Those with a grammar.

        Returns:
            [draws, ceil(vocab / 32)]. A row without a bit belongs to an answer that cannot go on:
            its grammar has grown past the library's limits.
        """
        self._calls += 1
        masks: Bits = np.zeros((len(draws), self._words), dtype=np.int32)
        states = [self._advance(draw) for draw in draws]
        live = [(s.matcher, row) for row, s in enumerate(states) if not s.matcher.is_error()]
        if live:
            self._compute(live, masks)
        for row, (draw, state) in enumerate(zip(draws, states, strict=True)):
            if state.matcher.is_error():
                masks[row] = 0
            masks[row] &= ~self._never
            self._hold_back_the_end(draw, masks[row])
        self._forget_idle()
        return masks

    def _compute(self, live: list[tuple[LLMatcher, int]], masks: Bits) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        if len(live) == 1:
            fill_next_token_bitmask(live[0][0], masks, live[0][1])
            return
        if self._executor is None:
            self._executor = LLExecutor()
        fill_next_token_bitmask_par(self._executor, live, masks)

    def _advance(self, draw: Draw) -> _State:
        """The state that has read the draw's output, all of it."""
        params, output = draw.params, draw.output_ids
        bucket = self._states.setdefault((params.grammar, params.seed, draw.choice), [])
        state = _furthest([s for s in bucket if s.used < self._calls], output)
        if state is None:
            state = _State(self._compiler.compile(params.grammar), (), 0)
            bucket.append(state)
        if rest := output[len(state.read) :]:
            state.matcher.consume_tokens(list(rest))
            state.read = output
        state.used = self._calls
        return state

    def _hold_back_the_end(self, draw: Draw, mask: Bits) -> None:
        """min_tokens, unless the answer has nowhere else to go."""
        if draw.position < draw.params.min_tokens:
            without = mask & ~self._bits(draw.params.stop_token_ids)
            if without.any():
                mask[:] = without

    def _forget_idle(self) -> None:
        if self._calls % _IDLE_CALLS:
            return
        limit = self._calls - _IDLE_CALLS
        for key, bucket in tuple(self._states.items()):
            kept = [state for state in bucket if state.used > limit]
            if kept:
                self._states[key] = kept
            else:
                del self._states[key]

    def _bits(self, ids: Sequence[int]) -> Bits:
        bits = np.zeros(self._words, dtype=np.uint32)
        for token_id in ids:
            bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return bits.view(np.int32)


def _furthest(bucket: Sequence[_State], output: tuple[int, ...]) -> _State | None:
    """Of the states that have read a beginning of the output, the one that is nearest its end."""
    fitting = [s for s in bucket if s.read == output[: len(s.read)]]
    return max(fitting, key=lambda s: len(s.read), default=None)
