"""LiteLLM and LangChain, as they are, against the running system: `make test-clients`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.integration.media import circle

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("CLIENTS_VENV", ROOT / ".venv-clients")) / "bin" / "python"

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


async def test_clients_of_other_projects_are_served(base_url: str, tmp_path: Path) -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: make test-clients"
    assert Path(sys.executable) != PYTHON
    picture = tmp_path / "red.png"
    circle("red").save(picture)
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(ROOT / "tests" / "clients" / "talk.py"), base_url, str(picture)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    told, _ = await process.communicate()
    lines = told.decode().splitlines()
    assert process.returncode == 0, "\n".join(lines[-40:])
    assert [line for line in lines if line.endswith(": ok")] == ["litellm: ok", "langchain: ok"]
