"""Requests made up from the OpenAPI document, fitting and not: none is answered with a 5xx.

TEST_CALLS says how many; `make test-schemathesis` makes 5,000.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

CALLS = int(os.environ.get("TEST_CALLS", "240"))
_ANSWERING = ("/v1/chat/completions", "/v1/completions")
_MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def tame(case: Case) -> None:
    """Keeps answers short: how long they are is not what is asked here."""
    if case.path in _ANSWERING and isinstance(case.body, dict):
        wanted = case.body.get("max_tokens")
        if wanted is None or (isinstance(wanted, int) and wanted > 4):
            case.body["max_tokens"] = 4
        case.body.pop("max_completion_tokens", None)
        if case.body.get("model") is not None and isinstance(case.body["model"], str):
            case.body["model"] = "demo"


@pytest.mark.timeout(3600)
def test_no_request_is_answered_with_a_5xx(base_url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method.upper() == "POST"]
    others = [operation for operation in operations if operation not in posts]
    codes: Counter[tuple[str, int]] = Counter()
    for operation in others:  # there is not much that can be asked of them
        _drive(operation, GenerationMode.POSITIVE, max(1, CALLS // 50), codes)
    left = CALLS - sum(codes.values())
    for operation in posts:
        for mode in _MODES:
            _drive(operation, mode, -(-left // (len(posts) * len(_MODES))), codes)
    print(f"\ncalls: {sum(codes.values())}; {sorted(codes.items())}")
    assert sum(codes.values()) >= CALLS
    assert all(code < 500 for _, code in codes), codes
    sound = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=sound, timeout=180)
    assert answer.status_code == 200, answer.text


def _drive(
    operation: Any, mode: GenerationMode, examples: int, codes: Counter[tuple[str, int]]
) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def call(case: Case) -> None:
        tame(case)
        answer = case.call(timeout=180)
        codes[(operation.path, answer.status_code)] += 1
        if answer.status_code >= 500:
            print(operation.path, answer.status_code, answer.text[:500], repr(case.body)[:1000])

    call()
