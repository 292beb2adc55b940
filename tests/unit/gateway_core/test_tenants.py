"""Limits of one key: requests a second, at once, and tokens a minute."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from chiasm.errors import ResourceExhausted
from gateway.tenants import KeyLimits, Tenants


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tenants(clock: Clock, **limits: float) -> Tenants:
    own = KeyLimits(**limits)  # type: ignore[arg-type]
    return Tenants({b"a": own, b"b": own}.__getitem__, clock=clock)


def refused(use: Tenants, word: str, tenant: bytes = b"a") -> float:
    with pytest.raises(ResourceExhausted, match=word) as caught, use.enter(tenant):
        raise AssertionError("was let in")
    assert caught.value.retry_after_s
    return caught.value.retry_after_s


def test_requests_a_second() -> None:
    clock = Clock()
    use = tenants(clock, requests_per_s=2)
    for _ in range(2):
        with use.enter(b"a"):
            pass
    assert refused(use, "2 requests a second") == pytest.approx(0.5)
    with use.enter(b"b"):  # another key's own
        pass
    clock.now += 0.5
    with use.enter(b"a"):
        pass
    refused(use, "a second")
    clock.now += 1000  # a second's worth is saved up, no more
    for _ in range(2):
        with use.enter(b"a"):
            pass
    refused(use, "a second")


def test_less_than_one_a_second() -> None:
    clock = Clock()
    use = tenants(clock, requests_per_s=0.1)
    with use.enter(b"a"):
        pass
    assert refused(use, "0.1 requests") == pytest.approx(10)
    clock.now += 10
    with use.enter(b"a"):
        pass


def test_requests_at_once() -> None:
    use = tenants(Clock(), inflight=2)
    with ExitStack() as inside:
        inside.enter_context(use.enter(b"a"))
        inside.enter_context(use.enter(b"a"))
        refused(use, "2 requests at once")
        inside.enter_context(use.enter(b"b"))
    with pytest.raises(ZeroDivisionError), use.enter(b"a"):
        raise ZeroDivisionError  # whatever ends it, it ends
    with use.enter(b"a"), use.enter(b"a"):
        pass


def test_tokens_a_minute() -> None:
    clock = Clock()
    use = tenants(clock, tokens_per_min=600)
    use.spend_prompt(b"a", 500)
    with pytest.raises(ResourceExhausted, match="600 tokens a minute") as caught:
        use.spend_prompt(b"a", 200)
    assert caught.value.retry_after_s == pytest.approx(10)
    use.spend(b"a", 400)  # an answer is never cut: the debt is waited for
    assert refused(use, "tokens a minute") == pytest.approx(30, abs=0.2)
    clock.now += 31
    with use.enter(b"a"):
        pass
    clock.now += 60
    use.spend_prompt(b"a", 10_000)  # more than a minute's worth needs a full bucket, and empties it
    refused(use, "tokens")
    use.spend_prompt(b"b", 600)


def test_who_has_no_key_or_no_limits_is_not_counted() -> None:
    use = tenants(Clock())
    for tenant in (b"", b"a"):
        for _ in range(1000):
            with use.enter(tenant):
                use.spend_prompt(tenant, 10**9)
                use.spend(tenant, 10**9)


@pytest.mark.parametrize(
    "words", [["x=1"], ["inflight"], ["inflight=x"], ["inflight=-1"], ["inflight=1", "inflight=2"]]
    + [["requests_per_s=inf"], ["requests_per_s=nan"], ["tokens_per_min=1.5"]],
)  # fmt: skip
def test_words_that_are_no_limits(words: list[str]) -> None:
    with pytest.raises(ValueError):
        KeyLimits.parse(words)


def test_words() -> None:
    found = KeyLimits.parse(["requests_per_s=2.5", "tokens_per_min=60000", "inflight=4"])
    assert found == KeyLimits(requests_per_s=2.5, tokens_per_min=60000, inflight=4)
