"""Who may talk to whom: one thing out of place, and the peer is refused by what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chiasm.errors import ContractMismatch
from chiasm.handshake import CONTRACT, Expected, check_decoder, check_encoder
from chiasm.v1 import common_pb2

EXPECTED = Expected("qwen2_5_vl", processor=b"p" * 32, tokenizer=b"t" * 32)
CHECKS = {"encoder": check_encoder, "decoder": check_decoder}


def description(role: str) -> common_pb2.Description:
    return common_pb2.Description(
        contract=CONTRACT,
        role=role,
        epoch=7,
        family="qwen2_5_vl",
        advertised_address="10.0.0.1:50051",
        digests=common_pb2.Digests(processor=b"p" * 32, tokenizer=b"t" * 32),
    )


@pytest.mark.parametrize("role", CHECKS)
def test_a_peer_that_fits(role: str) -> None:
    peer = description(role)
    peer.contract.minor += 1  # additions do no harm
    CHECKS[role](peer, EXPECTED)


@pytest.mark.parametrize("role", CHECKS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.contract.MergeFrom(common_pb2.ContractVersion(major=2)), "contract 2.0"),
        (lambda d: d.MergeFrom(common_pb2.Description(role="gateway")), "role is 'gateway'"),
        (lambda d: d.MergeFrom(common_pb2.Description(family="other")), "model family is 'other'"),
        (lambda d: d.ClearField("epoch"), "no epoch"),
        (lambda d: d.ClearField("digests"), r"digest is \(none\)"),
    ],
)
def test_a_peer_that_does_not(
    role: str, spoil: Callable[[common_pb2.Description], None], message: str
) -> None:
    peer = description(role)
    spoil(peer)
    with pytest.raises(ContractMismatch, match=f"10.0.0.1:50051.*{message}"):
        CHECKS[role](peer, EXPECTED)


def test_each_role_by_its_own_digest() -> None:
    peer = description("encoder")
    peer.digests.tokenizer = b""
    check_encoder(peer, EXPECTED)
    peer = description("decoder")
    peer.digests.processor = b""
    check_decoder(peer, EXPECTED)
