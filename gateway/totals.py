"""Metrics of several workers as one page: every series summed, and no counter ever goes back.

What a worker had counted when it died still counts. Knows no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

_ADD_UP = ("counter", "histogram", "summary")
_CREATED = "_created"  # when a series began: of a sum that says nothing

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a sample and its labels."""


@dataclass(slots=True)
class _Family:
    kind: str
    help: str
    gone: dict[Series, float] = field(default_factory=dict)
    """Of workers that are no more."""
    by_worker: dict[str, dict[Series, float]] = field(default_factory=dict)


class Totals:
    """What each worker said last, and what those said that are gone."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def update(self, worker: str, page: str) -> None:
        """Takes in a worker's page, in Prometheus' text format."""
        for metric in text_string_to_metric_families(page):
            family = self._families.setdefault(
                metric.name, _Family(metric.type, metric.documentation)
            )
            family.by_worker[worker] = _samples(metric)

    def gone(self, worker: str) -> None:
        """A worker has ended: its gauges are nothing now, its counts stay."""
        for family in self._families.values():
            last = family.by_worker.pop(worker, {})
            if family.kind in _ADD_UP:
                for series, value in last.items():
                    family.gone[series] = family.gone.get(series, 0.0) + value

    def page(self) -> str:
        """The sums, in the same format."""
        lines: list[str] = []
        for name, family in self._families.items():
            title = f"{name}_total" if family.kind == "counter" else name
            lines.append(f"# HELP {title} {_escaped(family.help)}")
            lines.append(f"# TYPE {title} {family.kind}")
            sums: dict[Series, float] = {}
            for part in (family.gone, *family.by_worker.values()):
                for series, value in part.items():
                    sums[series] = sums.get(series, 0.0) + value
            lines += [f"{_spelled(series)} {floatToGoString(v)}" for series, v in sums.items()]
        return "\n".join((*lines, ""))


def _samples(metric: Metric) -> dict[Series, float]:
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for sample in metric.samples
        if not sample.name.endswith(_CREATED)
    }


def _spelled(series: Series) -> str:
    name, labels = series
    if not labels:
        return name
    quoted = ",".join(f'{key}="{_quoted(value)}"' for key, value in labels)
    return f"{name}{{{quoted}}}"


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
