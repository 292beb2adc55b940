"""Metrics of several workers as one page."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from chiasm.telemetry import GatewayMetrics
from gateway.totals import Totals


def page(metrics: GatewayMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def value(text: str, name: str, **labels: str) -> float:
    (found,) = (
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    )
    return found


def test_series_add_up_and_those_of_the_dead_count_on() -> None:
    first, second, totals = GatewayMetrics(), GatewayMetrics(), Totals()
    first.requests.labels("200").inc(3)
    second.requests.labels("200").inc(4)
    second.requests.labels('4"\\\n').inc()
    first.ttft.labels("text").observe(0.02)
    second.ttft.labels("text").observe(3)
    first.inflight.set(2)
    second.inflight.set(5)
    totals.update("a", page(first))
    totals.update("b", page(second))
    text = totals.page()
    assert value(text, "chiasm_requests_total", code="200") == 7
    assert value(text, "chiasm_requests_total", code='4"\\\n') == 1
    assert value(text, "chiasm_num_requests_running") == 7
    stem = "chiasm_time_to_first_token_seconds"
    assert value(text, f"{stem}_count", kind="text") == 2
    assert value(text, f"{stem}_bucket", kind="text", le="0.025") == 1
    assert value(text, f"{stem}_sum", kind="text") == 3.02
    totals.gone("a")
    text = totals.page()
    assert value(text, "chiasm_requests_total", code="200") == 7
    assert value(text, "chiasm_num_requests_running") == 5
    third = GatewayMetrics()
    third.requests.labels("200").inc(1)
    totals.update("a", page(third))  # its next life begins at nought
    assert value(totals.page(), "chiasm_requests_total", code="200") == 8


def test_the_page_has_the_types_of_the_workers_pages() -> None:
    metrics, totals = GatewayMetrics(), Totals()
    totals.update("a", page(metrics))
    own = {f.name: f.type for f in text_string_to_metric_families(page(metrics))}
    summed = {f.name: f.type for f in text_string_to_metric_families(totals.page())}
    assert {k: v for k, v in own.items() if not k.endswith("_created")} == {
        k: v for k, v in summed.items() if not k.endswith("_created")
    }
