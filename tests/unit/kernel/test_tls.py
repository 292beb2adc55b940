"""Certificates as files that change, and what a container's health check says."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from chiasm.config import TlsConfig
from chiasm.fakes import FakeEncoder, serving
from chiasm.probe import is_live
from chiasm.tls import PeerTls, peer_tls
from tests.integration.certificates import Authority, Identity


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


def config_of(identity: Identity) -> TlsConfig:
    return TlsConfig(
        tls_cert_file=str(identity.certificate),
        tls_key_file=str(identity.key),
        tls_ca_file=str(identity.ca),
    )


def test_without_files_there_is_no_tls_and_with_some_of_them_an_error(authority: Authority) -> None:
    assert peer_tls(TlsConfig()) is None
    whole = config_of(authority.issue("some"))
    assert isinstance(peer_tls(whole), PeerTls)
    for name in ("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_peer_name"):
        with pytest.raises(ValueError, match="go together"):
            peer_tls(replace(whole, **{name: ""}))


def test_files_that_are_no_pair_are_refused_at_the_start(
    authority: Authority, tmp_path: Path
) -> None:
    one, other = config_of(authority.issue("one")), config_of(authority.issue("other"))
    with pytest.raises(ValueError, match="no certificate, its key and a CA"):
        peer_tls(replace(one, tls_key_file=other.tls_key_file))
    with pytest.raises(ValueError, match="no certificate, its key and a CA"):
        peer_tls(replace(one, tls_ca_file=str(tmp_path / "none")))


def test_a_pair_that_is_being_written_leaves_the_one_before(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    used, fresh = authority.issue("used"), authority.issue("fresh")
    tls = PeerTls(config_of(used))
    assert tls.version == 1
    with caplog.at_level(logging.INFO):
        used.certificate.write_bytes(fresh.certificate.read_bytes())
        assert [tls.version, tls.version] == [1, 1]
        tls.channel_credentials(), tls.server_credentials()
        assert len(caplog.records) == 1, "it is said once"
        used.key.write_bytes(fresh.key.read_bytes())
        assert [tls.version, tls.version] == [2, 2]
        used.ca.unlink()
        assert [tls.version, tls.version] == [2, 2]
    assert len(caplog.records) == 3
    assert "a new certificate is in use" in caplog.text


async def test_a_container_is_well_while_its_service_lives() -> None:
    async with serving(FakeEncoder()) as server:
        port = str(server.port)
        assert await asyncio.to_thread(is_live, "encoder", {"CHIASM_PORT": port})
        closed = {"CHIASM_PORT": "1", "CHIASM_HEALTH_PORT": port}
        assert await asyncio.to_thread(is_live, "decoder", closed), "where only peers get through"
        await server.live(False)
        assert not await asyncio.to_thread(is_live, "encoder", {"CHIASM_PORT": port})
    for role in ("encoder", "gateway"):
        assert not await asyncio.to_thread(is_live, role, {"CHIASM_PORT": port})
