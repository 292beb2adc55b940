"""One layout of ranks: how fast it decodes, how busy its GPUs are, whether it says what one says.

    python -m bench.served_shape DIRECTORY --text
    python -m bench.layouts --model DIRECTORY --tp-size 2 --pp-size 2 --json 2x2.json \\
        --reference 1x1.json

`decode` is that of `bench.decoder`. `busy` is the share of the time that each GPU works while 128
sequences decode, from traces of its kernels. `teach` writes down greedy answers with their margins;
with `--reference` it is given the answers of another layout, token by token, and must have the same
first choice wherever that one's margin is above noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.decoder import DecoderBench
from bench.engine import BenchEngine, finish, random_prompts
from bench.traced_rank import begin, trace_ranks
from chiasm.config.decoder import (
    DecoderConfig,
    MemoryConfig,
    ParallelConfig,
    SchedulerConfig,
)

BUSY_BATCH, PROMPT = 128, 128
TAUGHT, TAUGHT_TOKENS = 4, 32
NOISE = 0.1
"""Of log probabilities in bfloat16: first choices that are nearer than that may change places."""


class LayoutBench:
    """The parts; each returns what is written down.

    Args:
        engine: Of the layout.
        args: Of the command line.
        traces: Where ranks leave theirs.
    """

    def __init__(self, engine: BenchEngine, args: argparse.Namespace, traces: Path) -> None:
        self._engine = engine
        self._args = args
        self._traces = traces

    def run_decode(self) -> dict[str, Any]:
        """Tokens a second by batch size."""
        bench = DecoderBench(self._engine, self._args)
        bench.run_decode()
        return bench.results

    def run_busy(self) -> dict[str, Any]:
        """The share by rank; one rank is computed in this process, and not traced."""
        args, ranks = self._args, self._args.tp_size * self._args.pp_size
        if ranks == 1:
            return {}
        tokens = args.busy_tokens
        answers = [self._engine.ask(prompt, tokens) for prompt in self._prompts(args.busy_batch)]
        time.sleep(args.busy_after)
        begin(self._traces, args.busy_s)
        for answer in answers:
            finish(answer)
        deadline = time.monotonic() + 30.0
        found: dict[str, Any] = {}
        for rank in range(ranks):
            path = self._traces / f"rank-{rank}.json"
            while not path.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} left no trace: more --busy-tokens?")
                time.sleep(0.05)
            time.sleep(0.05)
            found[f"rank {rank}"] = json.loads(path.read_text(encoding="utf-8"))
        return {"busy": found}

    def run_teach(self) -> dict[str, Any]:
        """Greedy answers, or how many first choices differ from the reference's."""
        if self._args.reference is None:
            return {"taught": [self._answer(p) for p in self._prompts(TAUGHT)]}
        text = self._args.reference.read_text(encoding="utf-8")
        counts = {"compared": 0, "near": 0, "different": 0}
        for taught in json.loads(text)["taught"]:
            asked = [
                self._engine.ask(taught["prompt"] + taught["ids"][:at], 1, top_logprobs=2)
                for at in range(len(taught["ids"]))
            ]
            for answer, wanted, margin in zip(asked, taught["ids"], taught["margins"], strict=True):
                finish(answer)
                clear = margin > NOISE
                counts["compared"] += clear
                counts["near"] += not clear
                counts["different"] += clear and answer.token_ids != [wanted]
        return {"teach": counts}

    def _answer(self, prompt: list[int]) -> dict[str, Any]:
        answer = finish(self._engine.ask(prompt, TAUGHT_TOKENS, top_logprobs=2))
        margins = [float(top[0] - top[1]) for top in answer.top_logprobs]
        return {"prompt": prompt, "ids": answer.token_ids, "margins": margins}

    def _prompts(self, count: int) -> list[list[int]]:
        vocabulary = self._engine.text.vocab_size
        rng = np.random.default_rng(11)
        return random_prompts(count, PROMPT, vocabulary=vocabulary, rng=rng)


def main() -> None:
    """Runs the parts asked for; the results go into one file."""
    args = arguments()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        traces = Path(directory)
        trace_ranks(traces)
        engine = BenchEngine(config_of(args), args.model)
        print(f"started in {engine.start_s:.1f} s", flush=True)
        try:
            bench = LayoutBench(engine, args, traces)
            for part in args.parts.split(","):
                result = getattr(bench, f"run_{part}")()
                if part != "teach" or args.reference:
                    print("RESULT", json.dumps(result), flush=True)
                found |= result
                args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
        finally:
            engine.close()


def config_of(args: argparse.Namespace) -> DecoderConfig:
    """A decoder of that layout."""
    return DecoderConfig(
        model=str(args.model),
        parallel=ParallelConfig(tp_size=args.tp_size, pp_size=args.pp_size),
        scheduler=SchedulerConfig(
            chunked_prefill_size=8192, max_running_requests=max(*args.batches, args.busy_batch)
        ),
        memory=MemoryConfig(mem_fraction_static=args.memory, kv_bytes=1 << 26),
        max_model_len=20000,
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.layouts", description=__doc__)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--parts", default="decode,busy,teach")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--reference", type=Path, help="results of another layout, with teach")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint")
    parser.add_argument("--batches", type=_numbers, default=[1, 32, 128, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy-batch", type=int, default=BUSY_BATCH)
    parser.add_argument("--busy-tokens", type=int, default=1500)
    parser.add_argument("--busy-after", type=float, default=2.0, help="seconds, then it is traced")
    parser.add_argument("--busy-s", type=float, default=1.0, help="seconds traced")
    parser.add_argument("--memory", type=float, default=0.85)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
