"""Describe as a handshake: who may talk to whom. A peer that does not fit is refused by name.

The gateway checks each encoder and decoder against what it plans with. Which encoder's rows a
decoder takes is asked for each request (`gateway.routing.Endpoint.fits`); a decoder's `FetchOpen`
repeats the row format, so that an encoder can refuse on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from chiasm.errors import ContractMismatch
from chiasm.v1 import common_pb2

CONTRACT = common_pb2.ContractVersion(major=1, minor=0)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the gateway plans and tokenizes with."""

    family: str
    processor: bytes
    tokenizer: bytes


def check_encoder(description: common_pb2.Description, expected: Expected) -> None:
    """Raises ContractMismatch when this encoder may not be given our plans."""
    _check_peer(description, "encoder", expected.family)
    _same(description, "processor digest", description.digests.processor, expected.processor)


def check_decoder(description: common_pb2.Description, expected: Expected) -> None:
    """Raises ContractMismatch when this decoder may not be given our token ids."""
    _check_peer(description, "decoder", expected.family)
    _same(description, "tokenizer digest", description.digests.tokenizer, expected.tokenizer)


def _check_peer(description: common_pb2.Description, role: str, family: str) -> None:
    if description.contract.major != CONTRACT.major:
        raise ContractMismatch(
            f"{description.advertised_address} speaks contract {description.contract.major}."
            f"{description.contract.minor}, this is {CONTRACT.major}.{CONTRACT.minor}"
        )
    _same(description, "role", description.role, role)
    if not description.epoch:
        raise ContractMismatch(
            f"{role} {description.advertised_address}: it has no epoch, so its restarts could "
            "not be told"
        )
    _same(description, "model family", description.family, family)


def _same(
    description: common_pb2.Description, what: str, theirs: str | bytes, ours: str | bytes
) -> None:
    if theirs != ours:
        raise ContractMismatch(
            f"{description.role or 'peer'} {description.advertised_address}: {what} is "
            f"{_show(theirs)}, {_show(ours)} is needed"
        )


def _show(value: str | bytes) -> str:
    return repr(value) if isinstance(value, str) else (value.hex()[:16] or "(none)")
