"""When prompts join steps that decode: some steps late, together, while seats are scarce."""

from __future__ import annotations

from collections.abc import Iterable

from decoder_svc.engine.request import Sequence
from decoder_svc.scheduler.budget import Limits


class PromptGate:
    """A step with prompts costs more than one that only decodes: few such steps, well filled.

    Prompts wait for each other only where somebody waits for a seat in any case, and for so few
    steps that the seats they leave empty cost less. Whoever finds a free seat is served at once.
    Steps while all seats are taken count as well, so a prompt waits for the limit at most, and for
    fewer steps on average; the limit's default was measured so.

    Args:
        limits: How many tokens fill a step, and how many steps may pass.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_held = 0

    def opens(self, ready: Iterable[Sequence], *, num_decodes: int, is_scarce: bool) -> bool:
        """Whether this step takes prompts.

        Args:
            ready: Whose prompts it could take, in order.
            num_decodes: Sequences that decode in it.
            is_scarce: Whether somebody waits for a seat, and nobody for pages.
        """
        may_wait = num_decodes and is_scarce and self._num_held < self._limits.prefill_delay
        if may_wait and self._is_short(ready, self._limits.prompt_tokens(num_decodes)):
            self._num_held += 1
            return False
        self._num_held = 0
        return True

    def _is_short(self, ready: Iterable[Sequence], room: int) -> bool:
        """Whether prompts leave some of the room empty."""
        for sequence in ready:
            room -= sequence.num_left
            if room <= 0:
                return False
        return True
