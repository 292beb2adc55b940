"""The order of admission, as lists of demands show it, and whose turn the reserve is."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class AdmissionOrder:
    """Remembers who was ahead of whom, also while a request demands nothing.

    The head keeps its right to the reserve through steps in which it wants no rows: were the next
    in line to take the reserve then, the head's next rows might wait for ever.
    """

    def __init__(self) -> None:
        self._order: list[str] = []

    def observe(self, demanding: Sequence[str]) -> None:
        """Takes in one list of demands: its order rules, silent requests keep their place."""
        listed = list(dict.fromkeys(demanding))
        if not listed:
            return
        try:
            cut = self._order.index(listed[0])
        except ValueError:  # newly admitted: behind everybody
            cut = len(self._order)
        known = set(listed)
        ahead = [r for r in self._order[:cut] if r not in known]
        behind = [r for r in self._order[cut:] if r not in known]
        self._order = [*ahead, *listed, *behind]

    def head(self, waits_for_rows: Callable[[str], bool]) -> str | None:
        """The oldest admitted request that still waits for rows."""
        return next((r for r in self._order if waits_for_rows(r)), None)

    def leave(self, request_id: str) -> None:
        """The request is finished, aborted or preempted."""
        if request_id in self._order:
            self._order.remove(request_id)
