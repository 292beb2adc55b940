"""What the faces need from the inside of the gateway, and what handlers share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from chiasm.telemetry import GatewayMetrics
from gateway.api.budget import ByteBudget
from gateway.api.keys import ApiKeys
from gateway.messages import Event, Job, Readiness, ServedModel
from gateway.outlet import Outlet
from gateway.prompt import PromptBuilder
from gateway.tenants import Tenants


class Pipeline(Protocol):
    """The inside, as the faces see it."""

    def run(self, job: Job, outlet: Outlet | None = None) -> AsyncGenerator[Event, None]:
        """The job's events, but for deltas that leave by `outlet`.

        Errors before the first event are raised from the first `anext`.
        """
        ...

    def models(self) -> Sequence[ServedModel]:
        """Every name a request may use."""
        ...

    def readiness(self) -> Readiness:
        """Which parts are there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """What every handler of both faces works with."""

    pipeline: Pipeline
    prompts: PromptBuilder
    keys: ApiKeys
    tenants: Tenants
    """What each key may use."""
    metrics: GatewayMetrics
    max_body_bytes: int
    bodies: ByteBudget
    """Where the bytes of all request bodies are counted."""
    metrics_page: Callable[[], Awaitable[bytes]]
    """The metrics as text: this gateway's, or of all workers together."""

    @property
    def vocab_size(self) -> int:
        """Ids that sampling may name."""
        return self.prompts.vocab_size
