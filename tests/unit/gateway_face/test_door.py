"""What settings make of the front door."""

from __future__ import annotations

from pathlib import Path

import pytest

from chiasm.config import GatewayConfig, TlsConfig
from chiasm.config.gateway import FrontConfig
from chiasm.config.server import ServerConfig
from chiasm.tls import peer_tls
from gateway.door import Door, door_of
from tests.integration.certificates import Authority, Identity


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Authority(tmp_path_factory.mktemp("peers") / "ca").issue("peer")


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Authority(tmp_path_factory.mktemp("users") / "ca").issue("door")


def door(peers: Identity | None = None, **front: Path | str) -> Door:
    tls = TlsConfig()
    if peers:
        tls = TlsConfig(
            tls_cert_file=str(peers.certificate),
            tls_key_file=str(peers.key),
            tls_ca_file=str(peers.ca),
        )
    named = {f"front_{name}": str(value) for name, value in front.items()}
    config = GatewayConfig(model="demo", server=ServerConfig(tls=tls), front=FrontConfig(**named))
    return door_of(config, peer_tls(tls))


def test_a_door_is_as_strict_as_its_files_allow(peers: Identity, users: Identity) -> None:
    pair = {"cert_file": users.certificate, "key_file": users.key}
    assert door() == Door()
    found = [door(peers), door(peers, **pair), door(**pair, ca_file=users.ca), door(**pair)]
    assert [bool(made.tls) for made in found] == [True] * 4
    assert [made.strangers for made in found] == [False, False, False, True]


def test_an_operator_may_open_it(peers: Identity) -> None:
    assert door(peers, door="plain") == Door()
    assert door(peers, door="plain").context() is None
    shown = door(peers, door="tls")
    assert shown.strangers
    assert shown.context() is not None


def test_a_door_that_cannot_be_is_refused(peers: Identity, users: Identity) -> None:
    pair = {"cert_file": users.certificate, "key_file": users.key}
    with pytest.raises(ValueError, match="the door needs both"):
        door(door="tls")
    with pytest.raises(ValueError, match="the door needs both"):
        door(cert_file=users.certificate)
    with pytest.raises(ValueError, match="needs --front-ca-file"):
        door(door="required", **pair)
    with pytest.raises(ValueError, match="of no use"):
        door(peers, door="plain", **pair)
    with pytest.raises(ValueError, match="must be auto, plain, tls or required"):
        door(door="open")
