"""Random requests by the thousand: every number is finite, and memory does not grow.

    python -m bench.soak --requests 10000 --json soak.json

Lengths, sampling settings and token ids are random; what is kept of a request when it has ended
shows in the memory of the host and the GPU, which is looked at every thousand requests.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench.decoder import config_of
from bench.engine import Answer, BenchEngine, finish
from bench.shapes import write_shape
from chiasm.errors import ChiasmError

_MIB = 1 << 20
_AT_ONCE = 600
_SETTLED = 0.2  # of the requests; allocators and caches have their size by then


@dataclass(frozen=True, slots=True)
class Memory:
    """What engine and ranks hold, in MiB."""

    requests: int
    host: float
    gpu: float
    """Of the whole GPU, other libraries' memory included."""

    @classmethod
    def now(cls, requests: int, pids: Iterable[int]) -> Memory:
        """As the system tells it; the host's of these processes and of this one."""
        statistics = [Path(f"/proc/{pid}/statm") for pid in (os.getpid(), *pids)]
        pages = sum(int(path.read_text(encoding="ascii").split()[1]) for path in statistics)
        gpu = torch.cuda.device_memory_used() / _MIB if torch.cuda.is_available() else 0.0
        return cls(requests, round(pages * os.sysconf("SC_PAGE_SIZE") / _MIB, 1), round(gpu, 1))


@dataclass(slots=True)
class Report:
    """What came of it."""

    requests: int = 0
    failed: list[str] = field(default_factory=list)
    """Non-finite numbers fail a request, as anything else that goes wrong."""
    tokens: int = 0
    seconds: float = 0.0
    memory: list[Memory] = field(default_factory=list)

    @property
    def host_growth(self) -> float:
        """MiB from where memory has settled to the end."""
        return self.memory[-1].host - self._settled.host

    @property
    def gpu_growth(self) -> float:
        """MiB from where memory has settled to the end."""
        return self.memory[-1].gpu - self._settled.gpu

    @property
    def _settled(self) -> Memory:
        return next(m for m in self.memory if m.requests >= _SETTLED * self.requests)


def soak(
    engine: BenchEngine, count: int, *, vocabulary: int, most_tokens: int = 1000, seed: int = 5
) -> Report:
    """Sends `count` requests, several hundred at once, and looks at memory ten times."""
    rng = np.random.default_rng(seed)
    report = Report(requests=count)
    open_: deque[tuple[Answer, int]] = deque()
    begin = time.monotonic()
    for number in range(count):
        if len(open_) == _AT_ONCE:
            _end(report, *open_.popleft())
        length = int(np.clip(rng.lognormal(4.0, 1.2), 1, most_tokens))
        tokens = int(np.clip(rng.lognormal(3.3, 0.8), 1, most_tokens // 4))
        prompt = rng.integers(0, vocabulary - vocabulary // 64, length).tolist()
        open_.append((engine.ask(prompt, tokens, **_sampling(rng)), tokens))
        if number % max(count // 10, 1) == 0:
            report.memory.append(Memory.now(number, engine.rank_pids))
            while open_:  # batches of every size come by between two looks
                _end(report, *open_.popleft())
    while open_:
        _end(report, *open_.popleft())
    report.seconds = time.monotonic() - begin
    report.memory.append(Memory.now(count, engine.rank_pids))
    return report


def _end(report: Report, answer: Answer, tokens: int) -> None:
    try:
        finish(answer)
        assert len(answer.token_ids) == tokens, "an answer is too short"
    except (ChiasmError, AssertionError, TimeoutError) as error:
        report.failed.append(repr(error))
    report.tokens += len(answer.token_ids)


def _sampling(rng: np.random.Generator) -> dict[str, object]:
    """Two of three are greedy; the others draw, some with penalties or logprobs."""
    kind = int(rng.integers(0, 12))
    seed = int(rng.integers(0, 1 << 31))
    if kind < 8:
        return {}
    if kind == 8:
        return {"temperature": 1.0, "seed": seed}
    if kind == 9:
        return {"temperature": 0.8, "top_p": 0.9, "top_k": int(rng.integers(0, 50)), "seed": seed}
    if kind == 10:
        return {"temperature": 1.3, "min_p": 0.05, "seed": seed, "top_logprobs": 3}
    return {"presence_penalty": 0.5, "repetition_penalty": 1.1}


def main() -> int:
    """Runs it on the 7B shape, or on fewer of its layers. Returns 1 if a request failed."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(args.model or write_shape(Path(directory), num_layers=args.layers))
        engine = BenchEngine(config_of(args, model_dir), model_dir)
        try:
            report = soak(engine, args.requests, vocabulary=engine.text.vocab_size)
        finally:
            engine.close()
    result = {
        "requests": report.requests,
        "failed": len(report.failed),
        "why": report.failed[:3],
        "tokens": report.tokens,
        "seconds": round(report.seconds, 1),
        "host_growth_mib": round(report.host_growth, 1),
        "gpu_growth_mib": round(report.gpu_growth, 1),
        "memory": [[m.requests, m.host, m.gpu] for m in report.memory],
    }
    print("RESULT soak", json.dumps(result), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    return int(bool(report.failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--model", help="directory of another shape than the 7B one")
    parser.add_argument("--layers", type=int, help="fewer than the 28 of the 7B shape")
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument(
        "--kv-blocks",
        type=int,
        default=12000,
        help="pages; few, since the index of pages grows until each has been used once",
    )
    parser.add_argument("--kv-bytes", type=int, default=1 << 30, help="on a CPU")
    parser.add_argument("--max-len", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument("--device", default="auto")
    parser.set_defaults(tp_size=1, pp_size=1, batches=[256], chunk=8192, no_cuda_graphs=False)
    parser.set_defaults(attention_backend="auto", async_scheduling="auto")
    parser.set_defaults(max_mixed_tokens=1536, max_prefill_delay=4)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
