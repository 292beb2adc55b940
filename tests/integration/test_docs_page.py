"""The page at /docs, as a browser draws it, with no other address within reach."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
async def test_the_page_draws_every_route_and_field(base_url: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        *("--virtual-time-budget=10000", "--dump-dom", f"{base_url}/docs"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    told, _ = await process.communicate()
    page = told.decode()
    for words in (
        *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
        *("response_format", "structured_outputs", "tool_choice", "parallel_tool_calls"),
        *("<details>", "JsonSchemaBody", "continue_final_message"),
    ):
        assert words in page, words
    drawn = page.partition("<script>")[0]
    assert "undefined" not in drawn and "TypeError" not in drawn
