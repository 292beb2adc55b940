"""The agent's thread: writes, notifications, failures; and what closing an agent is worth."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from chiasm.errors import Unavailable
from chiasm.transport import DRAM, Region, WriteFailed
from chiasm.transport.agent import TransferAgent, load_nixl
from chiasm.transport.ucx import apply_ucx_settings, has_tcp
from tests.waiting import blocked_until

SIZE = 1 << 16


class Peer:
    """An agent with memory of its own and what it has heard."""

    def __init__(self, fill: int) -> None:
        self.memory = torch.full((SIZE,), fill, dtype=torch.uint8)
        self.region = Region(self.memory.data_ptr(), SIZE, DRAM)
        self.heard: list[bytes] = []
        self.agent = TransferAgent((self.region,), on_notices=self.heard.extend)

    def slice(self, offset: int, length: int) -> Region:
        return Region(self.region.address + offset, length, DRAM)

    def know(self, other: Peer) -> None:
        self.agent.connect(other.agent.name, other.agent.metadata).result(60)

    def write(self, other: Peer, offset: int, length: int, target: int, notice: bytes) -> None:
        pieces = [(self.region, offset, length)]
        place = [other.slice(target, length)]
        self.agent.write(other.agent.name, pieces, place, notice).result(60)


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    one, other = Peer(1), Peer(0)
    other.agent.await_notices(1)
    yield one, other
    one.agent.close()
    other.agent.close()


def until_heard(peer: Peer, notice: bytes) -> None:
    blocked_until(lambda: notice in peer.heard)


def test_bytes_go_where_they_should_and_then_the_peer_hears(peers) -> None:
    one, other = peers
    one.know(other)
    one.write(other, 0, 100, 1000, b"first")
    until_heard(other, b"first")
    assert other.memory.nonzero().flatten().tolist() == list(range(1000, 1100))


def test_pieces_are_written_in_one_go(peers) -> None:
    one, other = peers
    one.know(other)
    one.memory.copy_(torch.arange(SIZE) % 251)
    pieces = [(one.region, 10, 5), (one.region, 200, 7)]
    places = [other.slice(0, 5), other.slice(40, 7)]
    one.agent.write(other.agent.name, pieces, places, b"n").result(60)
    assert other.memory[:5].tolist() == [10, 11, 12, 13, 14]
    assert other.memory[40:47].tolist() == list(range(200, 207))


@pytest.mark.parametrize("what", ["unknown peer", "foreign memory", "lengths differ"])
def test_a_write_that_cannot_begin_says_so(peers, what: str) -> None:
    one, other = peers
    one.know(other)
    name, place = other.agent.name, other.slice(0, 8)
    match what:
        case "unknown peer":
            name = "nobody.0"
        case "foreign memory":
            place = other.slice(SIZE - 4, 8)
        case "lengths differ":
            place = other.slice(0, 9)
    with pytest.raises(WriteFailed) as failed:
        one.agent.write(name, [(one.region, 0, 8)], [place], b"n").result(60)
    assert not failed.value.aborted
    assert not other.memory.any()


def test_metadata_that_are_nonsense_or_anothers_are_refused(peers) -> None:
    one, other = peers
    for name, metadata in (
        ("nobody.0", b"nonsense"),
        ("nobody.0", b""),
        ("nobody.0", other.agent.metadata),
    ):
        with pytest.raises(WriteFailed):
            one.agent.connect(name, metadata).result(60)
    one.know(other)
    with pytest.raises(WriteFailed, match="another agent of that name"):
        one.agent.connect(other.agent.name, other.agent.metadata + b"x").result(60)


def test_a_closed_agent_can_be_followed_by_another_over_the_same_memory(peers) -> None:
    """What `LocalLanding.renew` does. (What is on the network then is lost: test_over_tcp.)"""
    one, other = peers
    one.know(other)
    one.write(other, 0, 8, 0, b"n")
    other.agent.close()
    heir = TransferAgent((other.region,))
    with pytest.raises(WriteFailed):
        one.write(other, 0, 8, 0, b"late")
    other.memory.zero_()
    one.agent.connect(heir.name, heir.metadata).result(60)
    one.agent.write(heir.name, [(one.region, 0, 8)], [other.slice(0, 8)], b"n").result(60)
    assert other.memory.any()
    heir.close()


def test_closing_twice_and_calls_after_it_do_no_harm(peers) -> None:
    one, other = peers
    one.agent.close()
    one.agent.close()
    one.agent.forget(other.agent.name)
    with pytest.raises(WriteFailed, match="closed"):
        one.know(other)
    with pytest.raises(WriteFailed, match="closed"):
        one.write(other, 0, 8, 0, b"n")


def test_a_machine_without_nixl_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nixl_cu13", "nixl_cu12"):
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    with pytest.raises(Unavailable, match="nixl cannot be used"):
        load_nixl()


@pytest.mark.parametrize(
    ("tls", "expected"),
    [
        (None, None),
        ("all", "all"),
        ("tcp", "tcp"),
        ("rc,cuda_copy", "rc,cuda_copy,tcp"),
        ("^ib", "^ib"),
        ("sysv, tcp", "sysv, tcp"),
        ("^tcp", "all"),
        ("^ib,tcp", "^ib"),
    ],
)
def test_tcp_stays_in_ucx_tls(tls: str | None, expected: str | None) -> None:
    environment = {} if tls is None else {"UCX_TLS": tls}
    apply_ucx_settings(environment)
    assert environment.get("UCX_TLS") == expected
    assert environment["UCX_LOG_LEVEL"] == "fatal"
    environment["UCX_LOG_LEVEL"] = "info"
    apply_ucx_settings(environment)
    assert environment["UCX_LOG_LEVEL"] == "info"


def test_tcp_can_be_taken_out_by_name() -> None:
    assert not has_tcp("^tcp") and not has_tcp("sysv,self")
