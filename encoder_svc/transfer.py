"""How this worker's rows leave it: NIXL from registered memory where it can, always gRPC."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from chiasm.config import EncoderConfig
from chiasm.errors import Unavailable
from chiasm.transport.agent import TransferAgent
from chiasm.transport.base import Outbound
from chiasm.transport.nixl import NixlOutbound
from encoder_svc.arena import RowArena

logger = logging.getLogger(__name__)

_SPARE = 8  # the share of the cache that is added for gaps between rows


@dataclass(frozen=True, slots=True)
class RowTransfer:
    """An agent and the memory it has registered."""

    agent: TransferAgent
    arena: RowArena

    @property
    def outbound(self) -> Outbound:
        """The sending end."""
        return NixlOutbound(self.agent, self.arena.region.memory_type)

    def close(self) -> None:
        """Nothing is written any more."""
        self.agent.close()


def open_transfer(config: EncoderConfig, device: torch.device) -> RowTransfer | None:
    """Memory for all rows of the cache, registered; None where rows travel over gRPC only.

    Raises:
        ValueError: NIXL is asked for and cannot be used.
    """
    if config.transport == "grpc":
        return None
    try:
        # Pieces of all sizes come and go: with some room to spare each finds a place in one piece.
        arena = RowArena(config.cache_bytes + config.cache_bytes // _SPARE, device)
        agent = TransferAgent((arena.region,))
    except Unavailable as error:
        if config.transport == "nixl":
            raise ValueError(f"--transport nixl: {error.message}") from None
        logger.info("%s: rows travel over grpc", error.message)
        return None
    logger.info("rows travel by nixl, from %s, to decoders that have it", arena.region.memory_type)
    return RowTransfer(agent, arena)
