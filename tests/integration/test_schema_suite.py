"""Answers that fit schemas, for every schema of a public test suite (a part of them by default).

TEST_SCHEMAS=all takes all of them: `make test-schemas`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from jsonschema.protocols import Validator

SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite.jsonl"
STRIDE = 1 if os.environ.get("TEST_SCHEMAS") == "all" else 12
AT_ONCE = 6
MAX_TOKENS = 160
_DRAFTS: dict[str, type[Validator]] = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}


def cases() -> list[dict[str, Any]]:
    lines = SUITE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][::STRIDE]


def body_of(schema: Any, seed: int) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "What is in the picture?"}]
    return {
        "model": "demo",
        "messages": messages,
        "response_format": form,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7,
        "seed": seed,
    }


async def outcome(client: httpx.AsyncClient, case: dict[str, Any], seed: int) -> str:
    """refused, cut or finished; anything else is an error."""
    answer = await client.post("/v1/chat/completions", json=body_of(case["schema"], seed))
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["code"] == "invalid_request", (case, error)
        assert error["param"] == "response_format.json_schema.schema", (case, error)
        return "refused"
    assert answer.status_code == 200, (case, answer.text)
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut"
    value = json.loads(choice["message"]["content"])
    validator = _DRAFTS[case["draft"]](case["schema"])
    errors = [error.message for error in validator.iter_errors(value)]
    assert not errors, (case, value, errors)
    return "finished"


async def test_every_finished_answer_validates(base_url: str) -> None:
    chosen = cases()
    found: Counter[str] = Counter()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, case: dict[str, Any]) -> None:
        async with gate:
            found[await outcome(client, case, index)] += 1

    async with httpx.AsyncClient(base_url=base_url, timeout=120) as client:
        await asyncio.gather(*(one(index, case) for index, case in enumerate(chosen)))
        health = await client.get("/ready")
    print(f"\nschemas: {len(chosen)} tried; {dict(found)}")
    assert sum(found.values()) == len(chosen)
    assert found["finished"] >= len(chosen) // 8
    assert health.json()["ready"]
