"""Real child processes: ready lines, restarts on one port, ends that leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from chiasm.process import Child, DidNotStart, Spec, Supervisor
from chiasm.process import supervisor as supervisor_module
from tests.waiting import until

# Serves on the port it is told, or on 4321 when told 0; says how it ended.
SERVE = textwrap.dedent(
    """
    import signal, sys, time
    port = sys.argv[sys.argv.index("--port") + 1]
    signal.signal(signal.SIGTERM, lambda *_: (print("draining", flush=True), sys.exit(0)))
    print("chiasm-ready role=x address=127.0.0.1:" + ("4321" if port == "0" else port), flush=True)
    time.sleep(600)
    """
)


def spec(name: str, code: str, *, stop_order: int = 0) -> Spec:
    command = (sys.executable, "-u", "-c", code, "--port", "0")
    return Spec(name, command, {"address": "--port"}, stop_order)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def lines() -> list[tuple[str, str]]:
    return []


@pytest.fixture
async def running(lines: list[tuple[str, str]]) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(lambda name, line: lines.append((name, line)), stop_s=60.0)
    yield supervisor
    await supervisor.stop()


async def test_launch_returns_the_ready_line(running: Supervisor) -> None:
    ready = await running.launch(spec("a", SERVE))
    assert ready == {"role": "x", "address": "127.0.0.1:4321"}
    assert running.waiting_for == ()


async def test_a_watcher_hears_of_every_beginning_and_end(lines: list[tuple[str, str]]) -> None:
    heard: list[tuple[str, str | None]] = []
    supervisor = Supervisor(
        lambda name, line: lines.append((name, line)),
        stop_s=60.0,
        watch=lambda name, ready: heard.append((name, ready and ready["address"])),
    )
    try:
        await supervisor.launch(spec("a", SERVE))
        os.kill(supervisor.pids()["a"], signal.SIGKILL)
        await until(lambda: len(heard) == 3)
        assert heard == [("a", "127.0.0.1:4321"), ("a", None), ("a", "127.0.0.1:4321")]
    finally:
        await supervisor.stop()
    assert heard[3:] == [("a", None)]


async def test_a_child_that_ends_first_is_named_with_its_last_words(running: Supervisor) -> None:
    with pytest.raises(DidNotStart, match=r"a did not start \(exit code 3\): no such model"):
        await running.launch(spec("a", "import sys; print('no such model'); sys.exit(3)"))


async def test_a_killed_child_comes_back_on_its_port(
    running: Supervisor, lines: list[tuple[str, str]]
) -> None:
    await running.launch(spec("a", SERVE))
    await running.launch(spec("b", SERVE))
    first = running.pids()
    os.kill(first["a"], signal.SIGKILL)
    await until(lambda: ("chiasm", "a is back") in lines)
    assert any("a died unexpectedly (killed by SIGKILL)" in line for _, line in lines)
    assert running.pids()["a"] != first["a"]
    assert running.pids()["b"] == first["b"]
    command = Path(f"/proc/{running.pids()['a']}/cmdline").read_bytes().split(b"\0")
    assert command[command.index(b"--port") + 1] == b"4321"


async def test_restarts_back_off(
    running: Supervisor, lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_S", (0.01, 0.02, 0.04))
    await running.launch(spec("a", SERVE.replace("time.sleep(600)", "sys.exit(7)")))
    await until(lambda: sum("died unexpectedly" in line for _, line in lines) >= 4)
    waits = [line.split("again in ")[1] for _, line in lines if "died unexpectedly" in line]
    assert waits[:4] == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]
    assert any("(exit code 7)" in line for _, line in lines)


async def test_stop_drains_in_order_and_leaves_nothing(lines: list[tuple[str, str]]) -> None:
    supervisor = Supervisor(lambda name, line: lines.append((name, line)), stop_s=60.0)
    await supervisor.launch(spec("late", SERVE, stop_order=1))
    await supervisor.launch(spec("early", SERVE, stop_order=0))
    pids = supervisor.pids()
    await supervisor.stop()
    assert [name for name, line in lines if line == "draining"] == ["early", "late"]
    assert not any(alive(pid) for pid in pids.values())


async def test_a_child_that_will_not_end_is_killed(lines: list[tuple[str, str]]) -> None:
    supervisor = Supervisor(lambda name, line: lines.append((name, line)), stop_s=0.3)
    code = SERVE.replace("sys.exit(0)", "None").replace(
        "time.sleep(600)", "[time.sleep(1) for _ in range(600)]"
    )
    await supervisor.launch(spec("a", code))
    pid = supervisor.pids()["a"]
    await supervisor.stop()
    assert ("chiasm", "a did not end within 0.3 s; killing it") in lines
    assert not alive(pid)


async def test_stop_during_a_start_ends_the_child(lines: list[tuple[str, str]]) -> None:
    supervisor = Supervisor(lambda name, line: lines.append((name, line)), stop_s=60.0)
    launch = asyncio.create_task(supervisor.launch(spec("a", "import time; time.sleep(600)")))
    await until(lambda: bool(supervisor.pids()))
    assert supervisor.waiting_for == ("a",)
    await supervisor.stop()
    with pytest.raises(DidNotStart, match="killed by SIGTERM"):
        await launch


async def test_an_endless_line_is_cut_not_refused() -> None:
    seen: list[str] = []
    code = "import sys; sys.stdout.write('x' * 3_000_000 + '\\nend\\n')"
    child = Child("a", (sys.executable, "-c", code), relay=seen.append)
    await child.start()
    assert await child.wait() == 0
    assert sum(len(line) for line in seen) == 3_000_003
    assert seen[-1] == "end"


async def test_a_daemon_that_holds_the_pipe_delays_nothing() -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)'], start_new_session=True); print(p.pid, flush=True)"
    )
    seen: list[str] = []
    child = Child("a", (sys.executable, "-c", code), relay=seen.append)
    await child.start()
    try:
        assert await asyncio.wait_for(child.wait(), 60.0) == 0
    finally:
        os.kill(int(seen[0]), signal.SIGKILL)


PARENT = textwrap.dedent(
    """
    import asyncio, sys
    from chiasm.process import Child

    async def main():
        code = (
            "import subprocess, sys, time;"
            "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
            "print('chiasm-ready grandchild=' + str(p.pid), flush=True); time.sleep(600)"
        )
        child = Child("a", (sys.executable, "-c", code), relay=lambda line: None)
        await child.start()
        ready = await child.ready()
        print(child.pid, ready["grandchild"], flush=True)
        await child.wait()
        print("ended", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
    """
)


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


async def test_what_a_killed_child_left_behind_is_killed(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    pid, grandchild = (int(word) for word in parent.stdout.readline().split())
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.to_thread(parent.stdout.readline) == "ended\n"
    await until(lambda: not alive(grandchild))


async def test_children_die_when_their_parent_is_killed(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    pid, grandchild = (int(word) for word in parent.stdout.readline().split())
    parent.kill()
    await until(lambda: not alive(pid))
    os.kill(grandchild, signal.SIGKILL)  # a service asks for the death of its own children
