"""A request's flights, one after another: when its decoder dies, it goes on at another.

What was sent stays sent: the next decoder resumes from the ids so far, with the same seed. The
client sees a pause, not an error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from chiasm.errors import ChiasmError, ResourceExhausted
from chiasm.telemetry import GatewayMetrics
from gateway.choices import Choices
from gateway.discovery import Fleet
from gateway.flight import Flight
from gateway.messages import Event
from gateway.order import Order
from gateway.outlet import Outlet
from gateway.patience import soon
from gateway.routing import Endpoint
from gateway.timeline import Timeline

logger = logging.getLogger(__name__)

MAX_MOVES = 3  # decoders one request may outlive


class Relay:
    """Flies orders.

    Args:
        fleet: Encoders and decoders.
        metrics: Counts moves.
        hedge_after_s: See `RoutingConfig`.
    """

    def __init__(
        self, fleet: Fleet, metrics: GatewayMetrics, *, hedge_after_s: float = 0.0
    ) -> None:
        self._fleet = fleet
        self._hedge_after_s = hedge_after_s
        self._metrics = metrics

    async def fly(
        self,
        order: Order,
        *,
        decoder: Endpoint,
        choices: Callable[[], Choices],
        timeline: Timeline,
        outlet: Outlet,
    ) -> AsyncGenerator[Event, None]:
        """Encode and generate at once, until all choices are done. Raises ChiasmError.

        Args:
            order: The planned request.
            decoder: To begin with.
            choices: Makes what detokenizes.
            timeline: The request's.
            outlet: See `Flight.events`.
        """
        failed: list[Endpoint] = []
        answered = False
        told = choices()
        while True:
            flight = Flight(
                order,
                decoder=decoder,
                choices=told,
                fleet=self._fleet,
                timeline=timeline,
                metrics=self._metrics,
                hedge_after_s=self._hedge_after_s,
            )
            try:
                async for event in flight.events(outlet):
                    answered = True
                    yield event
                return
            except ChiasmError as error:
                failed.append(decoder)
                if not flight.decoder_failed or len(failed) > MAX_MOVES:
                    raise
                decoder = await self._another(order, failed, error)
                told = told if answered else choices()
            finally:
                await flight.close()

    async def _another(
        self, order: Order, failed: Sequence[Endpoint], error: ChiasmError
    ) -> Endpoint:
        """Another decoder of the same language model. Raises `error` when there is none."""

        def find() -> Endpoint | None:
            return self._fleet.decoders.pick(
                b"", tokens=len(order.token_ids), like=failed[-1], exclude=failed
            )

        # A full decoder is no reason to wait for one that may come.
        full = isinstance(error, ResourceExhausted)
        other = find() if full else await soon(find, otherwise=error)
        if other is None:
            raise error
        logger.info("%s: moves to decoder %s", order.context.request_id, other.address)
        self._metrics.migrations.inc()
        return other
