"""Decoders: requests that begin alike share a prefix cache, unless its owner is far busier.

Load is in tokens: prompts that wait or run, how full the KV pages are, and failures. Who is next in
line for a prefix is as fixed as its owner, so that what overflows finds its cache again, too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence

from gateway.routing.base import Endpoint, Router, Seat, rank

PREFIX_TOKENS = 256
SLACK_TOKENS = 8192  # how much busier than the idlest the owner of a prefix may be
FULL_TOKENS = 65536  # what a full KV cache weighs


class DecoderRouter(Router):
    """Chooses decoders by prefix and load."""

    def pick(
        self,
        prefix: bytes,
        *,
        tokens: int,
        like: Endpoint | None = None,
        exclude: Collection[Endpoint] = (),
    ) -> Endpoint | None:
        """The decoder for a request; None when there is none.

        Args:
            prefix: From `prefix_key`.
            tokens: Of the prompt.
            like: Only decoders of this one's language model: what it began they can go on with.
            exclude: Endpoints not to choose; one that restarted is another.
        """

        def usable(among: Collection[Seat] | None) -> list[Seat]:
            return [
                seat
                for seat in self._open(exclude, among)
                if like is None or seat.endpoint.language_model == like.language_model
            ]

        seats = usable(self._near(prefix)) or usable(None)
        if not seats:
            return None
        weights = [self._weight(seat) for seat in seats]
        bound = min(weights) + max(SLACK_TOKENS, tokens)
        within = [seat for seat, weight in zip(seats, weights, strict=True) if weight <= bound]
        return max(within, key=lambda seat: rank(prefix, seat.key)).endpoint

    def has_another(self, address: str) -> bool:
        """Whether what runs at `address` could go on elsewhere now."""
        seat = self._seats.get(address)
        if seat is None:
            return False
        own = seat.endpoint
        return self.pick(b"", tokens=0, like=own, exclude=(own,)) is not None

    @property
    def max_model_len(self) -> int:
        """The longest context every decoder takes; 0 when there is none."""
        return min((endpoint.max_model_len for endpoint in self.endpoints), default=0)

    def check(self) -> None:
        """No seat is charged less than nothing."""
        assert all(seat.charged >= 0 for seat in self._seats.values())

    def _weight(self, seat: Seat) -> float:
        now = self._clock()
        return seat.load(now) + (seat.advice.usage + seat.faults(now)) * FULL_TOKENS


def prefix_key(salt: bytes, token_ids: Sequence[int], media: Sequence[tuple[int, bytes]]) -> bytes:
    """32 bytes that two requests of one tenant share when their first tokens and media do.

    Args:
        salt: The tenant's.
        token_ids: Of the prompt.
        media: (prompt offset, SHA-256 of the bytes) of each item; placeholders all look alike.
    """
    digest = hashlib.sha256(salt)
    first = token_ids[:PREFIX_TOKENS]
    digest.update(struct.pack(f"<{len(first)}I", *first))
    for offset, content in media:
        if offset < PREFIX_TOKENS:
            digest.update(content)
    return digest.digest()
