"""A sink that counts on the way to another: where the time of each entry went."""

from __future__ import annotations

from chiasm.plan import Cause, Span
from chiasm.telemetry import EncoderMetrics
from encoder_svc.messages import EncodeStats, RowBuffer, Sink


class MeteredSink:
    """See `encoder_svc.messages.Sink`."""

    def __init__(self, sink: Sink, metrics: EncoderMetrics) -> None:
        self._sink = sink
        self._metrics = metrics

    def segment_ready(self, key: bytes, segment: int, rows: Span, buffer: RowBuffer) -> None:
        """Passes it on."""
        self._sink.segment_ready(key, segment, rows, buffer)

    def finished(self, key: bytes, stats: EncodeStats) -> None:
        """Observes the entry's times."""
        self._metrics.queue_wait.observe(stats.queue_ms / 1e3)
        self._metrics.preprocess.observe(stats.preprocess_ms / 1e3)
        self._metrics.forward.observe(stats.forward_ms / 1e3)
        self._sink.finished(key, stats)

    def failed(self, key: bytes, cause: Cause, message: str) -> None:
        """Passes it on; the outcome is counted per Encode call, by the servicer."""
        self._sink.failed(key, cause, message)
