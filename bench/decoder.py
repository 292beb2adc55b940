"""Decoder speed on GPUs, without encoders and rpcs: decode by batch size, and prefill.

    python -m bench.decoder --tp-size 2 --parts decode,prefill --json decoder.json

The figures are defined as in bench/RESULTS-decoder.md: decode is B x (N - 1) tokens over the time
that N tokens take more than one token does, for B prompts of 128 random tokens at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.engine import BenchEngine, finish, random_prompts
from bench.shapes import write_shape
from chiasm.config.decoder import (
    DecoderConfig,
    MemoryConfig,
    ParallelConfig,
    SchedulerConfig,
)

PROMPT, OUT = 128, 256
FLOOR_READ_GBPS, FLOOR_TFLOPS = 4272.0, 745.0
WEIGHT_GB, KV_BYTES_A_TOKEN, GFLOP_A_TOKEN = 14.14, 57344, 14.14


def main() -> None:
    """Runs the parts asked for and prints one line each."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = write_shape(Path(directory), num_layers=args.layers)
        engine = BenchEngine(config_of(args, model_dir), model_dir)
        bench = DecoderBench(engine, args)
        bench.put("start", {"seconds": round(engine.start_s, 1), "kv_tokens": engine.kv_tokens})
        try:
            for part in args.parts.split(","):
                getattr(bench, f"run_{part}")()
        finally:
            if args.json:
                Path(args.json).write_text(json.dumps(bench.results, indent=1), encoding="utf-8")
            engine.close()


class DecoderBench:
    """The parts; each prints what it measures.

    Args:
        engine: Running.
        args: Of the command line.
    """

    def __init__(self, engine: BenchEngine, args: argparse.Namespace) -> None:
        self.results: dict[str, dict[str, float]] = {}
        self._engine = engine
        self._args = args
        self._rng = np.random.default_rng(7)

    def put(self, key: str, value: dict[str, float]) -> None:
        """Keeps and prints a result."""
        self.results[key] = value
        print("RESULT", key, json.dumps(value), flush=True)

    def run_decode(self) -> None:
        """Tokens a second by batch size."""
        for batch in self._args.batches:
            rates = []
            for repeat in range(self._args.repeats + 1):
                short, _ = self._engine.wave(self._prompts(batch, PROMPT), 1)
                long, _ = self._engine.wave(self._prompts(batch, PROMPT), OUT)
                if repeat:
                    rates.append(batch * (OUT - 1) / (long - short))
            rate = statistics.median(rates)
            context = batch * (PROMPT + OUT / 2) * KV_BYTES_A_TOKEN / 1e9
            read_ms = (WEIGHT_GB + context) / FLOOR_READ_GBPS * 1e3
            floor_ms = max(read_ms, batch * GFLOP_A_TOKEN / FLOOR_TFLOPS)
            self.put(
                f"decode.{batch}",
                {
                    "tokens_s": round(rate, 1),
                    "low": round(min(rates), 1),
                    "high": round(max(rates), 1),
                    "step_ms": round(batch / rate * 1e3, 3),
                    "floor_ms": round(floor_ms, 3),
                },
            )

    def run_prefill(self) -> None:
        """Time of one prompt to its first token."""
        for length in self._args.prefill:
            times = []
            for repeat in range(self._args.repeats + 3):
                taken, _ = self._engine.wave(self._prompts(1, length), 1)
                if repeat:
                    times.append(taken)
            median = statistics.median(times)
            self.put(
                f"prefill.{length}",
                {"tokens_s": round(length / median, 1), "ms": round(median * 1e3, 2)},
            )

    def run_profile(self) -> None:
        """Kernels of some decode steps and of one prefill, by time on the GPU."""
        from torch.profiler import ProfilerActivity, profile

        for batch in self._args.batches:
            answers = [self._engine.ask(p, 400) for p in self._prompts(batch, PROMPT)]
            time.sleep(1.0)
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
                time.sleep(0.15)
            for answer in answers:
                finish(answer)
            print(f"PROFILE decode {batch}")
            table = trace.key_averages()
            print(
                table.table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60)
            )
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            self._engine.wave(self._prompts(1, 8192), 1)
        print("PROFILE prefill 8192")
        table = trace.key_averages()
        print(table.table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60))

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        vocabulary = self._engine.text.vocab_size
        return random_prompts(count, length, vocabulary=vocabulary, rng=self._rng)


def config_of(args: argparse.Namespace, model_dir: Path) -> DecoderConfig:
    """A decoder as these options say, with random weights."""
    return DecoderConfig(
        model=str(model_dir),
        parallel=ParallelConfig(tp_size=args.tp_size, pp_size=args.pp_size),
        scheduler=SchedulerConfig(
            chunked_prefill_size=args.chunk,
            max_mixed_tokens=args.max_mixed_tokens,
            max_prefill_delay=args.max_prefill_delay,
            max_running_requests=max(args.batches),
            async_scheduling=args.async_scheduling,
        ),
        memory=MemoryConfig(
            mem_fraction_static=args.memory, kv_bytes=args.kv_bytes, kv_blocks=args.kv_blocks
        ),
        max_model_len=args.max_len,
        attention_backend=args.attention_backend,
        cuda_graphs=not args.no_cuda_graphs,
        load_format="dummy",
        device=args.device,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--parts", default="decode,prefill", help="of decode,prefill,profile")
    parser.add_argument("--batches", type=_numbers, default=[1, 32, 128, 256])
    parser.add_argument("--prefill", type=_numbers, default=[2048, 8192, 16000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--max-mixed-tokens", type=int, default=0)
    parser.add_argument("--max-prefill-delay", type=int, default=0)
    parser.add_argument("--max-len", type=int, default=20000, help="tokens of one sequence")
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--kv-blocks", type=int, default=0, help="pages; 0 = as many as fit")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30, help="on a CPU")
    parser.add_argument("--layers", type=int, help="fewer than the 28 of the 7B shape")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--async-scheduling", default="auto")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
