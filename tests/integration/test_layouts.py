"""The model over ranks in processes says what it says on one: any layout, any crash."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from decoder_svc.runner.ranks import RanksExecutor
from tests.checkpoints import DEMO, save_tiny_qwen
from tests.layouts import LaidOut, ask_everything

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return {
        "tied": save_tiny_qwen(directory / "tied", tied=True, kv_heads=2),
        "untied": save_tiny_qwen(directory / "untied", tied=False, kv_heads=2, seed=3),
        "demo": DEMO,
    }


@cache
def answers(
    model_dir: Path, tp_size: int = 1, pp_size: int = 1, ahead: bool = False
) -> dict[str, list[list[int]]]:
    engine = LaidOut(model_dir, tp_size=tp_size, pp_size=pp_size, ahead=ahead)
    try:
        ask_everything(engine)
        engine.run()
        return engine.answers()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("model", "tp_size", "pp_size", "ahead"),
    [
        ("tied", 1, 1, True),
        ("tied", 1, 2, False),
        ("tied", 1, 4, True),
        ("tied", 2, 1, True),
        ("tied", 2, 2, False),
        ("tied", 2, 4, True),
        ("tied", 4, 1, False),  # two KV heads: each on two ranks
        ("tied", 4, 2, False),
        ("untied", 1, 4, False),
        ("untied", 2, 2, True),
        ("untied", 4, 1, True),
        ("demo", 2, 2, False),
    ],
)
def test_every_layout_gives_the_same_answers(
    checkpoints: dict[str, Path], model: str, tp_size: int, pp_size: int, ahead: bool
) -> None:
    expected = answers(checkpoints[model])
    assert len(expected) == 12
    assert len({str(ids) for ids in expected.values()}) == 11  # "same" is "text", the others differ
    assert answers(checkpoints[model], tp_size, pp_size, ahead) == expected


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("harm", "rank"), [(_kill, 0), (_kill, 3), (_stop, 1)], ids=["first", "last", "stopped"]
)
def test_a_group_that_loses_a_rank_comes_back_and_no_request_is_lost(
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[int], None],
    rank: int,
) -> None:
    monkeypatch.setattr("decoder_svc.runner.group._SILENCE_S", 4.0)
    engine = LaidOut(checkpoints["tied"], tp_size=2, pp_size=2)
    executor = engine.parts.executor
    assert isinstance(executor, RanksExecutor)
    before = executor.pids
    harmed = []

    def at_step(step: int) -> None:
        begun = sum(len(outcome.tokens()) for outcome in engine.outcomes.values())
        if begun > 20 and not harmed:
            harmed.append(before[rank])
            harm(before[rank])

    try:
        ask_everything(engine)
        engine.run(at_step=at_step)
        assert harmed and executor.num_losses == 1
        assert engine.answers() == answers(checkpoints["tied"])
        after = executor.pids
        assert len(after) == 4 and not set(before) & set(after)
        assert not any(_is_alive(pid) for pid in before)
    finally:
        engine.close()
    assert not any(_is_alive(pid) for pid in after)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
