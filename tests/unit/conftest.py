"""What tests of several parts ask for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

import chiasm.channel
from chiasm.channel import CHANNEL_OPTIONS

# Of what a machine leaves a test, none is a reason to fail, and every run tries the same examples.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


@pytest.fixture
def hour_between_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel that has failed to connect fails every call for an hour: no test waits so long."""
    pauses = dict.fromkeys(
        ("grpc.initial_reconnect_backoff_ms", "grpc.max_reconnect_backoff_ms"), 3_600_000
    )
    options = tuple((dict(CHANNEL_OPTIONS) | pauses).items())
    monkeypatch.setattr(chiasm.channel, "CHANNEL_OPTIONS", options)
