"""Requests as a chat service sees them, and what became of them. No torch: two engines share it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_SPECIAL = 2000  # ids at the end of the vocabulary that stand for no text
_LEAST_ID = 1000


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that ends after so many tokens, whatever they are."""

    prompt_ids: list[int]
    num_tokens: int


@dataclass(slots=True)
class Heard:
    """When its tokens came, in seconds."""

    sent_at: float = 0.0
    times: list[float] = field(default_factory=list)
    """One a token; tokens that came together have the same."""
    token_ids: list[int] = field(default_factory=list)


def chat_load(count: int, *, vocabulary: int, seed: int) -> list[Asked]:
    """Random text of lengths as in logs of chats: log-normal, cut at 1,024 tokens each way.

    The averages, 200 tokens of prompt and 200 of answer, are about those of the 1,000 requests of
    ShareGPT that serving benchmarks commonly use.
    """
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(4.7, 1.2, count), 4, 1024).astype(int)
    answers = np.clip(rng.lognormal(4.9, 0.95, count), 4, 1024).astype(int)
    return [
        Asked(rng.integers(_LEAST_ID, vocabulary - _SPECIAL, length).tolist(), int(tokens))
        for length, tokens in zip(prompts, answers, strict=True)
    ]


def figures(load: list[Asked], heard: list[Heard]) -> dict[str, float]:
    """Rates and times of a load that was sent at once."""
    for asked, answer in zip(load, heard, strict=True):
        assert len(answer.times) == asked.num_tokens, "an answer is not of the length asked for"
    begin = min(answer.sent_at for answer in heard)
    end = max(answer.times[-1] for answer in heard)
    tokens = sum(asked.num_tokens for asked in load)
    gaps = np.concatenate([np.diff(answer.times) for answer in heard]) * 1e3
    firsts = np.array([answer.times[0] - answer.sent_at for answer in heard]) * 1e3
    paces = [
        (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1) * 1e3
        for answer in heard
        if len(answer.times) > 1
    ]
    return {
        "requests": len(load),
        "prompt_tokens": sum(len(asked.prompt_ids) for asked in load),
        "answer_tokens": tokens,
        "seconds": round(end - begin, 3),
        "tokens_s": round(tokens / (end - begin), 1),
        "busy_tokens_s": round(_busy_rate(load, heard, begin), 1),
        "itl_p50_ms": round(float(np.percentile(gaps, 50)), 2),
        "itl_p90_ms": round(float(np.percentile(gaps, 90)), 2),
        "itl_p99_ms": round(float(np.percentile(gaps, 99)), 2),
        "itl_max_ms": round(float(gaps.max()), 1),
        "pace_p50_ms": round(float(np.percentile(paces, 50)), 2),
        "pace_p99_ms": round(float(np.percentile(paces, 99)), 2),
        "ttft_p50_ms": round(float(np.percentile(firsts, 50)), 1),
        "ttft_p99_ms": round(float(np.percentile(firsts, 99)), 1),
    }


def _busy_rate(load: list[Asked], heard: list[Heard], begin: float) -> float:
    """Tokens a second until the last request had its first token: afterwards the batch empties."""
    until = max(answer.times[0] for answer in heard)
    count = sum(sum(time <= until for time in answer.times) for answer in heard)
    return count / (until - begin)


def keep(path: Path, key: str, value: object) -> None:
    """Adds a result to a file of results, and prints it."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**known, key: value}, indent=1), encoding="utf-8")
    print("RESULT", key, json.dumps(value), flush=True)
