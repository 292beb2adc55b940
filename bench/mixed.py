"""A decoder under a mixed load at full rate: requests of chat lengths, all at once.

    python -m bench.mixed --json mixed.json [--peer DIRECTORY --peer-path PATH]

Each engine runs in a process of its own, one after the other, and is driven through its
asynchronous interface, without rpcs. With `--peer` the other is vLLM's AsyncLLM, with the same
token ids and lengths, batch size and share of memory; DIRECTORY is a checkpoint that it can read
the shape from, PATH what its process needs on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.mixed_load import Asked, Heard, chat_load, figures, keep

MOST_RUNNING = 256
WARM_UP_SEED = 99
ROWS = (
    ("tokens_s", "output tokens/s"),
    ("busy_tokens_s", "the same until the last request has begun"),
    ("seconds", "seconds"),
    ("itl_p50_ms", "inter-token latency, ms: p50"),
    ("itl_p99_ms", "p99"),
    ("itl_max_ms", "largest"),
    ("pace_p99_ms", "ms a token of a request: p99"),
    ("ttft_p50_ms", "time to first token, ms: p50"),
    ("ttft_p99_ms", "p99"),
)


def main() -> None:
    """Runs one engine in this process, or each in one of its own and prints the table."""
    args = _arguments()
    if args.engine:
        run = {"chiasm": _run_chiasm, "vllm": _run_peer}[args.engine]
        asyncio.run(run(args))
        return
    results = Path(args.json)
    command = [sys.executable, "-m", "bench.mixed", *sys.argv[1:]]
    subprocess.run([*command, "--engine", "chiasm"], check=True)
    if args.peer:
        path = f"{args.peer_path}:{Path(__file__).parents[1]}"
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run([*command, "--engine", "vllm"], check=True, env=environment)
    _print_table(json.loads(results.read_text(encoding="utf-8")))


async def _run_chiasm(args: argparse.Namespace) -> None:
    from bench.decoder import config_of
    from bench.shapes import write_shape
    from chiasm.telemetry import DecoderMetrics
    from decoder_svc.assembly import build_engine, load_parts, warm_up
    from decoder_svc.config import read_text_config
    from decoder_svc.engine.client import EngineClient

    started = time.monotonic()
    directory = tempfile.mkdtemp()
    model_dir = Path(args.model or write_shape(Path(directory), num_layers=args.layers))
    args.batches = [MOST_RUNNING]
    config = config_of(args, model_dir)
    parts = load_parts(config, read_text_config(model_dir), model_dir)
    warm_up(parts.executor, num_blocks=parts.num_blocks, block_size=config.memory.block_size)
    metrics = DecoderMetrics()
    client = EngineClient(max_waiting=2 * args.requests + args.warm_up, metrics=metrics)
    core = build_engine(config, parts, client.mailbox, metrics)
    thread = threading.Thread(target=core.run, name="engine", daemon=True)
    thread.start()
    start = {
        "start_s": round(time.monotonic() - started, 1),
        "kv_tokens": parts.num_blocks * config.memory.block_size,
    }
    try:
        await measure(args, Ours(client), "chiasm", start)
    finally:
        core.stop()
        thread.join(10)
        parts.executor.close()
        parts.slab.close()
        shutil.rmtree(directory)


async def _run_peer(args: argparse.Namespace) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    started = time.monotonic()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=args.peer,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=args.max_len,
            max_num_batched_tokens=args.peer_batched_tokens,
            max_num_seqs=MOST_RUNNING,
            gpu_memory_utilization=args.memory,
            limit_mm_per_prompt={"image": 4, "video": 0},
            disable_log_stats=True,
            tensor_parallel_size=args.tp_size,
            pipeline_parallel_size=args.pp_size,
        )
    )
    start: dict[str, float] = {"start_s": round(time.monotonic() - started, 1)}
    cache = engine.vllm_config.cache_config
    if cache.num_gpu_blocks:
        start["kv_tokens"] = cache.num_gpu_blocks * cache.block_size
    try:
        await measure(args, Peer(engine), "vllm", start)
    finally:
        engine.shutdown()


class Ours:
    """Asks through the client that the service uses.

    Args:
        client: Of a running engine.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._count = 0

    async def ask(self, asked: Asked, heard: Heard) -> None:
        """Sends a request and notes when its tokens come."""
        from decoder_svc.engine.messages import AddRequest, RequestDone, RequestFailed, Tokens
        from decoder_svc.sampling.params import SamplingParams

        self._count += 1
        params = SamplingParams(max_tokens=asked.num_tokens, temperature=0.0)
        heard.sent_at = time.monotonic()
        stream = self._client.open(
            AddRequest(
                request_id=str(self._count), prompt_ids=tuple(asked.prompt_ids), sampling=params
            )
        )
        over = False
        while not over:
            for event in await stream.next():
                if isinstance(event, Tokens):
                    heard.times += [time.monotonic()] * len(event.token_ids)
                    heard.token_ids += event.token_ids
                elif isinstance(event, RequestFailed):
                    raise event.error
                over = over or isinstance(event, RequestDone)
        stream.close()


class Peer:
    """Asks vLLM's asynchronous engine.

    Args:
        engine: AsyncLLM.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._count = 0

    async def ask(self, asked: Asked, heard: Heard) -> None:
        """Sends a request and notes when its tokens come."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=asked.num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        heard.sent_at = time.monotonic()
        prompt = {"prompt_token_ids": asked.prompt_ids}
        async for output in self._engine.generate(prompt, params, request_id=str(self._count)):
            ids = output.outputs[0].token_ids
            heard.times += [time.monotonic()] * len(ids)
            heard.token_ids += ids


async def measure(
    args: argparse.Namespace, engine: Ours | Peer, name: str, start: dict[str, float]
) -> None:
    """A warm-up of other requests, then the load as often as was asked for."""
    results = Path(args.json)
    keep(results, f"{name}.start", start)
    vocabulary = args.vocabulary
    await _send(engine, chat_load(args.warm_up, vocabulary=vocabulary, seed=WARM_UP_SEED))
    for repeat in range(args.repeats):
        # Other ids each time, so that no page is found again, and the same for both engines.
        load = chat_load(args.requests, vocabulary=vocabulary, seed=args.seed + repeat)
        heard = await _send(engine, load)
        keep(results, f"{name}.{repeat}", figures(load, heard))


async def _send(engine: Ours | Peer, load: list[Asked]) -> list[Heard]:
    heard = [Heard() for _ in load]
    await asyncio.gather(*(engine.ask(a, h) for a, h in zip(load, heard, strict=True)))
    return heard


def _print_table(results: dict[str, Any]) -> None:
    names = [name for name in ("chiasm", "vllm") if f"{name}.start" in results]
    print("| | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    kv = [str(results[f"{name}.start"].get("kv_tokens", "-")) for name in names]
    print("| KV tokens | " + " | ".join(kv) + " |")
    for key, label in ROWS:
        cells = []
        for name in names:
            runs = [v[key] for k, v in results.items() if k.startswith(name) and key in v]
            cells.append(" / ".join(f"{run:g}" for run in runs))
        print(f"| {label} | " + " | ".join(cells) + " |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="mixed.json", help="file that results are added to")
    parser.add_argument("--engine", choices=("chiasm", "vllm"), help="run this one, here")
    parser.add_argument("--peer", help="checkpoint directory for vLLM")
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of vLLM's process")
    parser.add_argument("--peer-batched-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=300, help="requests before")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--max-mixed-tokens", type=int, default=1536)
    parser.add_argument("--max-prefill-delay", type=int, default=4)
    parser.add_argument("--max-len", type=int, default=20000, help="tokens of one sequence")
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--kv-blocks", type=int, default=0, help="pages; 0 = as many as fit")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30, help="on a CPU")
    parser.add_argument("--model", help="directory of another shape than the 7B one")
    parser.add_argument("--layers", type=int, help="fewer than the 28 of the 7B shape")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--async-scheduling", default="auto")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
