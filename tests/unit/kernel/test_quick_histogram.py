"""It says what prometheus_client's own histogram says."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from chiasm.quick_histogram import QuickHistogram

BUCKETS = (0.001, 0.25, 1.0, 10.0)


def test_pages_are_equal() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = QuickHistogram("x_seconds", "A time", buckets=BUCKETS, registry=ours)
    usual = Histogram("x_seconds", "A time", buckets=BUCKETS, registry=theirs)
    draw = random.Random(1)
    values = [*BUCKETS, 0.0, 11.0, *(draw.uniform(0, 12) for _ in range(200))]
    for value in values:
        times = draw.randint(1, 3)
        quick.observe(value, times)
        for _ in range(times):
            usual.observe(value)
    assert _lines(ours) == _lines(theirs)


def _lines(registry: CollectorRegistry) -> list[str]:
    """Without the time of creation; sums differ in their last digits."""
    lines = generate_latest(registry).decode().splitlines()
    assert any(line.startswith("x_seconds_sum") for line in lines)
    return [
        f"{line.split()[0]} {float(line.split()[1]):.6f}" if line.startswith("x_") else line
        for line in lines
        if "_created" not in line
    ]
