"""The examples work as they stand."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.integration.media import circle
from tests.integration.stack import Service
from tests.integration.test_foreign_clients import PYTHON

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, command
    return told.decode()


@pytest.fixture(name="picture")
def picture_(tmp_path: Path) -> str:
    path = tmp_path / "red.png"
    circle("red").save(path)
    return str(path)


async def test_the_python_example_answers(gateway: Service, picture: str) -> None:
    example = EXAMPLES / "grpc_chat.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 21
    answer = await run(sys.executable, str(example), gateway.grpc, picture)
    assert "red" in answer and "circle" in answer


@pytest.mark.clients
async def test_the_grpcurl_example_answers(
    gateway: Service, picture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}")
    answer = await run(str(EXAMPLES / "grpc_chat.sh"), gateway.grpc, picture)
    assert '"delta"' in answer and '"stop"' in answer
