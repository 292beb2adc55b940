"""What one key may use: requests a second, requests at once, tokens a minute.

Policy: no network, and time is an argument. Who has no key has no limits of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from chiasm.errors import ResourceExhausted

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Of one key; 0 = none."""

    requests_per_s: float = 0.0
    """Up to a second's worth may come at once."""
    inflight: int = 0
    """Requests inside at once, those that wait included."""
    tokens_per_min: int = 0
    """Of prompts, counted before they are worked on, and of answers, counted when they end."""

    def shared(self, share: float) -> KeyLimits:
        """A share of them; none of those there are becomes none."""
        if share == 1:
            return self
        return KeyLimits(
            requests_per_s=self.requests_per_s * share,
            inflight=math.ceil(self.inflight * share),
            tokens_per_min=math.ceil(self.tokens_per_min * share),
        )

    @classmethod
    def parse(cls, words: list[str]) -> KeyLimits:
        """`inflight=4 tokens_per_min=60000`. Raises ValueError."""
        kinds = {field.name: float if field.type == "float" else int for field in fields(cls)}
        found: dict[str, float] = {}
        for word in words:
            name, _, text = word.partition("=")
            if name not in kinds or name in found:
                raise ValueError(f"{name}: write {', '.join(f'{n}=<number>' for n in kinds)}")
            try:
                value = kinds[name](text)
            except ValueError:
                raise ValueError(f"{name}: not a number") from None
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}: must be at least 0")
            found[name] = value
        return cls(**found)  # type: ignore[arg-type]


class Bucket:
    """Tokens that come back at a steady rate, up to one burst. It may be overdrawn."""

    def __init__(self, now: float) -> None:
        self._level = 1.0  # share of the burst
        self._at = now

    def wait_s(self, amount: float, *, rate: float, burst: float, now: float) -> float:
        """Seconds until so much is there, or the bucket full."""
        self._level = min(1.0, self._level + (now - self._at) * rate / burst)
        self._at = now
        return max(0.0, (min(amount / burst, 1.0) - self._level) * burst / rate)

    def take(self, amount: float, *, burst: float) -> None:
        """Takes it, whether it is there or not."""
        self._level -= amount / burst


class _Tenant:
    def __init__(self, now: float) -> None:
        self.inflight = 0
        self.requests = Bucket(now)
        self.tokens = Bucket(now)


class Tenants:
    """Every tenant's use.

    Args:
        limits_of: The limits of a tenant, asked for each time: they may change.
        share: Of all limits that is ours, where several gateways share the requests.
        clock: Seconds.
    """

    def __init__(
        self,
        limits_of: Callable[[bytes], KeyLimits] = lambda tenant: KeyLimits(),
        *,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits_of = lambda tenant: limits_of(tenant).shared(share)
        self._clock = clock
        self._tenants: dict[bytes, _Tenant] = {}

    @contextmanager
    def enter(self, tenant: bytes) -> Iterator[None]:
        """One request of a tenant, from beginning to end. Raises ResourceExhausted."""
        if not tenant:
            yield
            return
        limits, use = self._limits_of(tenant), self._use(tenant)
        if limits.inflight and use.inflight >= limits.inflight:
            raise _too_much(f"{limits.inflight} requests at once", 1.0)
        self._check_tokens(use, limits, 1)
        if limits.requests_per_s:
            burst = max(1.0, limits.requests_per_s)
            wait_s = use.requests.wait_s(
                1, rate=limits.requests_per_s, burst=burst, now=self._clock()
            )
            if wait_s > 0:
                raise _too_much(f"{limits.requests_per_s:g} requests a second", wait_s)
            use.requests.take(1, burst=burst)
        use.inflight += 1
        try:
            yield
        finally:
            use.inflight -= 1

    def spend_prompt(self, tenant: bytes, tokens: int) -> None:
        """Takes a prompt's tokens before anything is done with it. Raises ResourceExhausted."""
        if tenant:
            self._check_tokens(self._use(tenant), self._limits_of(tenant), tokens)
            self.spend(tenant, tokens)

    def spend(self, tenant: bytes, tokens: int) -> None:
        """Takes tokens that have been made: those in debt wait longer next time."""
        if tenant and (burst := self._limits_of(tenant).tokens_per_min):
            self._use(tenant).tokens.take(tokens, burst=burst)

    def _check_tokens(self, use: _Tenant, limits: KeyLimits, tokens: int) -> None:
        if burst := limits.tokens_per_min:
            wait_s = use.tokens.wait_s(
                tokens, rate=burst / _MINUTE_S, burst=burst, now=self._clock()
            )
            if wait_s > 0:
                raise _too_much(f"{burst} tokens a minute", wait_s)

    def _use(self, tenant: bytes) -> _Tenant:
        """As many are kept as there are keys: only known ones come here."""
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(self._clock())
        return found


def _too_much(limit: str, wait_s: float) -> ResourceExhausted:
    return ResourceExhausted(f"this API key may use {limit}", retry_after_s=wait_s)
