"""Answers that fit schemas: those of a public test suite, and random ones.

Of the 594 and 500 CI takes a part; TEST_SCHEMAS=all takes all of them: `make test-schemas`.
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
import pytest
from jsonschema.protocols import Validator
from tokenizers import Tokenizer

from chiasm.demo import checkpoint_dir
from tests.random_schemas import random_schema

SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite.jsonl"
STRIDE = 1 if os.environ.get("TEST_SCHEMAS") == "all" else 12
AT_ONCE = 12
MAX_TOKENS = 400
NUM_RANDOM = 500
_DRAFTS: dict[str, type[Validator]] = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}
_TOKENIZER = Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))
NUDGE = {str(_TOKENIZER.token_to_id(token)): 6 for token in ('"', "}", "]", "<|im_end|>")}


def cases() -> list[dict[str, Any]]:
    lines = SUITE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][::STRIDE]


def random_cases() -> list[dict[str, Any]]:
    seeds = range(0, NUM_RANDOM, STRIDE)
    return [{"draft": "draft2020-12", "schema": random_schema(seed)} for seed in seeds]


def body_of(schema: Any, seed: int) -> dict[str, Any]:
    """The model knows nothing of JSON: it is nudged to come to an end, not to what is right."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "What is in the picture?"}]
    return {
        "model": "demo",
        "messages": messages,
        "response_format": form,
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "logit_bias": NUDGE,
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


async def ask_all(base_url: str, name: str, chosen: list[dict[str, Any]]) -> Counter[str]:
    found: Counter[str] = Counter()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, case: dict[str, Any]) -> None:
        async with gate:
            found[await outcome(client, case, index)] += 1

    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        await asyncio.gather(*(one(index, case) for index, case in enumerate(chosen)))
        health = await client.get("/ready")
    print(f"\n{name} schemas: {len(chosen)} tried; {dict(found)}")
    assert sum(found.values()) == len(chosen)
    assert health.json()["ready"]
    return found


@pytest.mark.timeout(1800)
async def test_the_suite_s_schemas_are_obeyed_or_refused(base_url: str) -> None:
    chosen = cases()
    found = await ask_all(base_url, "the suite's", chosen)
    assert found["finished"] >= len(chosen) // 4
    assert found["refused"] < len(chosen) * 3 // 4


@pytest.mark.timeout(1800)
async def test_random_schemas_are_obeyed(base_url: str) -> None:
    chosen = random_cases()
    found = await ask_all(base_url, "random", chosen)
    assert found["finished"] >= len(chosen) // 2
