"""Groups of ranks from the engine's side, without processes: start, loss, back-off, rendezvous."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from chiasm.errors import Unavailable
from decoder_svc.config import TextConfig, read_text_config
from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.parallel import ParallelMesh
from decoder_svc.parallel.launch import Rendezvous, rendezvous_of
from decoder_svc.parallel.stages import check_layout, stage_layers
from decoder_svc.runner.codec import Alive, Failed, Message, Ready, Start, decode, encode
from decoder_svc.runner.executor import RanksLost
from decoder_svc.runner.group import Member, RankGroup
from decoder_svc.runner.hub import RankHub, dial, read_token
from decoder_svc.runner.ranks import RanksExecutor
from tests.checkpoints import save_tiny_qwen
from tests.integration.cluster import free_port

PLAN = StepPlan(1, ())


class Puppets:
    """Launches groups whose ranks are pipes in the test's hands."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: list[Connection] = []
        self.starts: list[Start] = []
        self.closed = False

    def __call__(self, start: Start) -> RankGroup:
        self.starts.append(start)
        pairs = [Pipe() for _ in range(2)]
        self.ends = [theirs for _, theirs in pairs]
        members = [Member(rank, ours, None) for rank, (ours, _) in enumerate(pairs)]
        return RankGroup(members, start, clock=lambda: self.now)

    def close(self) -> None:
        self.closed = True

    def say(self, rank: int, message: Message) -> None:
        self.ends[rank].send_bytes(encode(message))

    def hear(self, rank: int) -> Message:
        assert self.ends[rank].poll(1.0)
        return decode(self.ends[rank].recv_bytes())


def executor_of(puppets: Puppets) -> RanksExecutor:
    return RanksExecutor(puppets, depth=2, clock=lambda: puppets.now)


def make_ready(executor: RanksExecutor, puppets: Puppets) -> None:
    executor.poll()
    for rank in (0, 1):
        assert isinstance(puppets.hear(rank), Start)
        puppets.say(rank, Ready(50 + rank))
    executor.poll()
    assert executor.ready and executor.num_blocks == 50


def test_every_rank_hears_every_plan_once_and_one_answers() -> None:
    puppets = Puppets()
    executor = executor_of(puppets)
    make_ready(executor, puppets)
    executor.submit(PLAN)
    assert [puppets.hear(rank) for rank in (0, 1)] == [PLAN, PLAN]
    assert not puppets.ends[0].poll()
    puppets.say(0, Alive())
    assert executor.collect() is None
    puppets.say(1, StepResult(1, ()))
    assert executor.collect() == StepResult(1, ())
    executor.close()
    assert puppets.closed


def test_a_lost_group_is_told_once_and_started_again_with_back_off_and_as_many_pages() -> None:
    puppets = Puppets()
    executor = executor_of(puppets)
    make_ready(executor, puppets)
    delays = (0.5, 1.0, 2.0)
    for delay in delays:
        executor.submit(PLAN)
        puppets.ends[0].close()
        with pytest.raises(RanksLost, match="rank 0 has died"):
            executor.collect()
        assert not executor.ready
        started = len(puppets.starts)
        puppets.now += delay - 0.01
        executor.poll()
        assert len(puppets.starts) == started
        puppets.now += 0.02
        make_ready(executor, puppets)
    assert executor.num_losses == 3
    assert [start.num_blocks for start in puppets.starts] == [0, 50, 50, 50]
    assert len({start.group for start in puppets.starts}) == 4
    puppets.now += 61.0  # healthy for long enough to be forgiven
    for rank in (0, 1):
        puppets.say(rank, Alive())
    executor.poll()
    puppets.say(1, Failed("RuntimeError", is_users=False))
    with pytest.raises(RanksLost, match="rank 1 failed: RuntimeError"):
        executor.poll()
    puppets.now += 0.6
    make_ready(executor, puppets)


def test_a_silent_rank_is_a_lost_one_but_a_long_step_is_not() -> None:
    puppets = Puppets()
    executor = executor_of(puppets)
    make_ready(executor, puppets)
    executor.submit(PLAN)
    for _ in range(10):  # 90 s of one step, during which both say that they live
        puppets.now += 9.0
        for rank in (0, 1):
            puppets.say(rank, Alive())
        assert executor.collect() is None
    puppets.now += 21.0
    puppets.say(0, Alive())
    with pytest.raises(RanksLost, match="rank 1 has fallen silent"):
        executor.collect()


def test_a_rank_that_dies_while_it_loads_is_tried_again_quietly() -> None:
    puppets = Puppets()
    executor = executor_of(puppets)
    executor.poll()
    puppets.ends[1].close()
    executor.poll()
    assert not executor.ready and executor.num_losses == 0
    puppets.now += 0.6
    make_ready(executor, puppets)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Failed("no room for K and V", is_users=True), ValueError),
        (Failed("RuntimeError", is_users=False), Unavailable),
    ],
)
def test_the_first_start_fails_with_the_reason(message: Failed, error: type[Exception]) -> None:
    puppets = Puppets()
    executor = executor_of(puppets)
    executor._begin()
    puppets.say(0, message)
    with pytest.raises(error, match=message.message):
        executor.start()
    executor.close()


# Rendezvous.


def test_hosts_are_known_by_the_usual_variables() -> None:
    assert rendezvous_of({}) == Rendezvous()
    assert rendezvous_of({"MASTER_ADDR": "a", "NNODES": "1"}) == Rendezvous()
    torchrun = {"MASTER_ADDR": "a", "MASTER_PORT": "7", "NODE_RANK": "1", "NNODES": "2"}
    assert rendezvous_of(torchrun) == Rendezvous(host="a", port=7, node_rank=1, num_nodes=2)
    workers = {"LWS_LEADER_ADDRESS": "l.x", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}
    assert rendezvous_of(workers) == Rendezvous(host="l.x", node_rank=3, num_nodes=4)
    for wrong in ({"NNODES": "2"}, {**torchrun, "NODE_RANK": "2"}, {**torchrun, "NNODES": "two"}):
        with pytest.raises(ValueError, match=r"node|NNODES"):
            rendezvous_of(wrong)


def test_hosts_hold_whole_stages_and_equally_many() -> None:
    second = Rendezvous(host="a", node_rank=1, num_nodes=2)
    assert second.local_ranks(tp_size=2, pp_size=4) == range(4, 8)
    for tp_size, pp_size in ((2, 1), (4, 3), (1, 1)):
        with pytest.raises(ValueError, match="whole stages"):
            second.local_ranks(tp_size=tp_size, pp_size=pp_size)


def test_ranks_of_other_hosts_come_in_with_the_secret_only() -> None:
    here = Rendezvous(host="127.0.0.1", port=free_port(), num_nodes=2)
    hub = RankHub(here, b"t" * 16, (2, 3))
    try:
        from multiprocessing import AuthenticationError

        with pytest.raises((AuthenticationError, EOFError, OSError)):
            dial(here, b"x" * 16, 2)
        first, stranger = dial(here, b"t" * 16, 2), dial(here, b"t" * 16, 7)
        assert hub.take() == []
        again, other = dial(here, b"t" * 16, 2), dial(here, b"t" * 16, 3)
        members: list[Member] = []
        while not members:
            members = hub.take()
        assert [member.rank for member in members] == [2, 3]
        members[0].channel.send_bytes(b"hello")
        assert again.recv_bytes() == b"hello"  # the newest counts, the one before is sent away
        for gone in (first, stranger):
            with pytest.raises((EOFError, OSError)):
                gone.recv_bytes()
        other.close()
    finally:
        hub.close()


def test_a_secret_is_needed_and_not_a_short_one(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "none")):
        with pytest.raises(ValueError, match="--rank-token-file"):
            read_token(path)
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(ValueError, match="at least 16"):
        read_token(str(tmp_path / "short"))
    (tmp_path / "good").write_text("0123456789abcdef\n")
    assert read_token(str(tmp_path / "good")) == b"0123456789abcdef"


# Layouts.


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextConfig:
    return read_text_config(save_tiny_qwen(tmp_path_factory.mktemp("tiny")))


def changed(text: TextConfig, **fields: object) -> TextConfig:
    from dataclasses import replace

    return replace(text, **fields)  # type: ignore[arg-type]


def test_what_cannot_be_laid_out_is_refused_by_name(text: TextConfig) -> None:
    check_layout(text, tp_size=4, pp_size=4)  # two KV heads on four ranks: replicated
    deep = changed(text, deepstack_levels=3)
    check_layout(deep, tp_size=1, pp_size=1)
    for config, tp_size, pp_size, message in (
        (text, 3, 1, "attention heads: 4 cannot be split over --tp-size 3"),
        (text, 1, 5, "4 layers cannot fill 5 pipeline stages"),
        (changed(text, num_heads=6, num_kv_heads=3), 2, 1, "KV heads: 3"),
        (changed(text, num_heads=12, num_kv_heads=3), 4, 1, "3 KV heads cannot be replicated"),
        (changed(text, intermediate_size=130), 4, 1, "intermediate_size: 130"),
        (deep, 1, 2, "the first stage, which must hold the 3"),
    ):
        with pytest.raises(ValueError, match=message):
            check_layout(config, tp_size=tp_size, pp_size=pp_size)


def test_the_lm_head_counts_as_layers_of_the_last_stage(text: TextConfig) -> None:
    def counts(config: TextConfig, pp_size: int) -> list[int]:
        meshes = [ParallelMesh(pp_rank=rank, pp_size=pp_size) for rank in range(pp_size)]
        ranges = [stage_layers(config, mesh) for mesh in meshes]
        assert [i for r in ranges for i in r] == list(range(config.num_layers))
        return [len(r) for r in ranges]

    seven = changed(  # the shape of a 7B of this family
        text,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rotary_dim=128,
        vocab_size=152064,
        mrope_section=(16, 24, 24),
    )
    assert counts(seven, 1) == [28]
    assert counts(seven, 2) == [15, 13]
    assert counts(seven, 4) == [8, 8, 7, 5]
    assert counts(changed(seven, vocab_size=64), 4) == [7, 7, 7, 7]
    assert counts(changed(seven, vocab_size=10**7), 4) == [9, 9, 9, 1]
