"""Families at full size, random weights: do they load fast, equal the reference, and serve?

    python -m bench.families --family Qwen3-VL-8B --dir /dev/shm/checkpoint --json out.json

Rows and logits in bfloat16 against transformers in bfloat16, on the same weights and pixels; and,
to know what rounding alone does, transformers with another attention and in float32. Loading is
compared with reading the same files from page cache with as many threads. `--small` with
`--device cpu` rehearses it: fewer layers, narrower.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from bench.family_checkpoint import make_reference, write_checkpoint
from bench.family_engine import (
    REPEATS,
    Likeness,
    Loaded,
    Prepares,
    Stopwatch,
    reference_logits,
    reference_rows,
)
from bench.family_shapes import SHAPES
from chiasm.checkpoint import weight_files
from chiasm.plan import Modality
from chiasm.weight_copier import num_threads
from encoder_svc.runner import TowerRunner
from tests.integration.media import data_uri
from tests.integration.stack import Stack
from tests.parity.harness import Prepared

NUM_TOKENS = 32
QUESTION = " ".join(
    ["What is in the picture? Which colour is the circle, and how many are there?"] * 6
)
_PIECE_BYTES = 16 << 20


def main() -> None:
    """Runs one family; prints and keeps what is found as it comes."""
    args = _arguments()
    run = FamilyRun(args)
    try:
        run.make()
        run.load()
        run.serve_if_there_is_room()
        run.compare()
        run.serve()
    finally:
        run.close()


class FamilyRun:
    """The stages, each of which leaves what the next one needs.

    Args:
        args: Of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.results: dict[str, Any] = {"family": args.family, "torch": torch.__version__}
        self._args = args
        self._device = torch.device(args.device)
        self._watch = Stopwatch(self._device)
        self._shape = SHAPES[args.family]
        self._path = Path(args.dir)
        self._picture = _picture(args.width, args.height)
        self._stack: Stack | None = None
        self._reference: Any = None

    def put(self, key: str, value: Any) -> None:
        """Keeps and prints a result."""
        self.results[key] = value
        self.results["seconds"] = self._watch.seconds
        print("RESULT", key, json.dumps(value), flush=True)
        if self._args.json:
            Path(self._args.json).write_text(json.dumps(self.results, indent=1), encoding="utf-8")

    def make(self) -> None:
        """The reference, and its weights as files."""
        shape, small = self._shape, self._args.small
        self._reference = self._watch.time("make reference", make_reference)(
            shape, device=self._device, small=small
        )
        written = self._watch.time("write", write_checkpoint)
        eight_bits = self._args.eight_bits
        total = written(self._reference, shape, self._path, eight_bits=eight_bits)
        self.put("weights_bytes", total)

    def load(self) -> None:
        """Tower and language model, and the same files read and nothing else."""
        files = weight_files(self._path)
        _read_once(files)  # what was written by other cores
        self._tower: TowerRunner = self._watch.best("load tower", TowerRunner.load)(
            self._path, device=str(self._device), dtype="bfloat16", row_dtype="auto"
        )
        self._engine = Loaded(self._path, self._device, self._watch)
        reads = [_read_once(files) for _ in range(REPEATS)]
        seconds = self._watch.seconds
        load = seconds["load tower"] + seconds["load language model"]
        first = seconds["load tower, first"] + seconds["load language model, first"]
        total = sum(file.stat().st_size for file in files)
        self.put(
            "load",
            {
                "bytes": total,
                "threads": num_threads(),
                "seconds": round(load, 3),
                "first_seconds": round(first, 3),
                "gb_s": round(total / load / 1e9, 2),
                "read_seconds": [round(s, 3) for s in reads],
                "read_gb_s": round(total / min(reads) / 1e9, 2),
                "share": round(min(reads) / load, 3),
                "first_share": round(reads[0] / first, 3),
            },
        )

    def compare(self) -> None:
        """Rows and logits, and decoding's pace."""
        served = Prepares(self._path, self._reference, self._tower)
        prepare = self._watch.time("prepare", served.prepare)
        made: Prepared = prepare([(Modality.IMAGE, self._picture)], QUESTION)
        self._made, self._builder = made, served.builder
        made.patches = [patches.to(self._device) for patches in made.patches]
        self._engine.tap.is_open = True
        self._tokens, _ = self._watch.time("answer", self._engine.answer)("a", made, NUM_TOKENS)
        count = len(made.ids) + NUM_TOKENS - 1
        ours = torch.cat(self._engine.tap.seen)[:count]
        self._engine.tap.is_open = False
        self._engine.tap.seen.clear()
        rows = torch.cat(made.rows)
        levels = 1 + self._engine.text.deepstack_levels
        theirs = self._watch.time("reference rows", reference_rows)(served, made)
        self.put(
            "rows",
            vars(Likeness.of(rows.unflatten(1, (levels, -1)), theirs.unflatten(1, (levels, -1)))),
        )
        logits = self._watch.time("reference logits", reference_logits)
        self._compare_logits(ours, served, made, logits)
        self._time_decoding(made)

    def _compare_logits(
        self, ours: torch.Tensor, served: Prepares, made: Prepared, logits: Any
    ) -> None:
        prompt = len(made.ids)
        theirs = logits(served, made, self._tokens)
        same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
        self.put("prompt_tokens", prompt)
        self.put("logits", vars(Likeness.of(ours, theirs)))
        self.put("logits_decoded", vars(Likeness.of(ours[prompt:], theirs[prompt:])))
        self.put("same_likeliest", round(float(same), 4))
        self.put("logits_std", round(float(theirs.float().std()), 3))
        self._reference.set_attn_implementation("eager")
        other = logits(served, made, self._tokens)
        self.put("reference_eager_against_sdpa", vars(Likeness.of(other, theirs)))
        decoded = Likeness.of(other[prompt:], theirs[prompt:])
        self.put("reference_eager_against_sdpa_decoded", vars(decoded))
        del other
        self._reference.set_attn_implementation("sdpa")
        if not self._args.no_float32:
            self._reference.float()
            wide = logits(served, made, self._tokens)
            self.put("logits_against_float32", vars(Likeness.of(ours, wide)))
            self.put("reference_against_float32", vars(Likeness.of(theirs, wide)))

    def _time_decoding(self, made: Prepared) -> None:
        self._engine.answer("b", made, 2)
        _, short = self._engine.answer("c", made, 2)
        _, long = self._engine.answer("d", made, 2 + self._args.timed_tokens)
        self.put("decode_ms_a_token", round((long - short) / self._args.timed_tokens * 1e3, 3))

    def serve_if_there_is_room(self) -> None:
        """Starts the services while the comparison goes on."""
        if not self._args.serve_last:
            self._start()

    def serve(self) -> None:
        """A picture and a question over REST, answered by the real services."""
        self._engine.close()
        del self._engine, self._tower
        self._reference = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        stack = self._stack or self._start()
        gateway = self._watch.time("services ready", self._join)(stack)
        url = {"url": data_uri(self._picture)}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
        body = {
            "model": str(self._path),
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "logprobs": True,
            "ignore_eos": True,
            "return_timings": True,
        }
        with httpx.Client(base_url=f"http://{gateway}", timeout=60) as client:
            body["model"] = client.get("/v1/models").json()["data"][0]["id"]
            for name in ("first", "second"):
                began = time.perf_counter()
                answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
                taken = time.perf_counter() - began
                self._put_answer(name, answer, taken)

    def _put_answer(self, name: str, answer: dict[str, Any], taken: float) -> None:
        told = [bytes(t["bytes"] or ()) for t in answer["choices"][0]["logprobs"]["content"]]
        expected = [self._builder.vocabulary.bytes_of(token) for token in self._tokens]
        pairs = enumerate(zip(told, expected, strict=True))
        same = next((i for i, (a, b) in pairs if a != b), len(told))
        self.put(
            f"served_{name}",
            {
                "seconds": round(taken, 3),
                "usage": answer["usage"],
                "prompt_tokens_equal": answer["usage"]["prompt_tokens"] == len(self._made.ids),
                "tokens_equal_until": same,
                "timings": answer.get("timings"),
            },
        )

    def _start(self) -> Stack:
        self._stack = stack = Stack(self._path, {"OMP_NUM_THREADS": "4"})
        flags = ("--device", str(self._device), "--dtype", "bfloat16")
        self._started = time.perf_counter()
        stack.start("encoder_svc", *flags)
        stack.start(
            "decoder_svc", *flags, "--kv-blocks", "512", "--max-running-requests", "8",
            "--max-model-len", "8192",
        )  # fmt: skip
        return stack

    def _join(self, stack: Stack) -> str:
        ready = {}
        for service in stack.services:
            service.wait_ready(180)
            ready[service.name] = round(time.perf_counter() - self._started, 2)
        encoder, decoder = stack.services[:2]
        urls = ("--encoder-urls", encoder.address, "--decoder-urls", decoder.address)
        gateway = stack.start("gateway", *urls).wait_ready(60)
        self.put("services_ready_after_s", ready)
        return gateway.address

    def close(self) -> None:
        """Ends the services and removes the checkpoint."""
        if self._stack is not None:
            self._stack.stop()
            for service in self._stack.services:
                if not self.results.get("served_second"):
                    print(f"--- {service.name}", *service.lines[-30:], sep="\n", flush=True)
        shutil.rmtree(self._path, ignore_errors=True)


def _read_once(files: tuple[Path, ...]) -> float:
    """Seconds that the loader's number of threads take to read all files, and nothing else."""
    pieces = [
        (file, begin) for file in files for begin in range(0, file.stat().st_size, _PIECE_BYTES)
    ]
    lanes = threading.local()

    def read(piece: tuple[Path, int]) -> None:
        file, begin = piece
        if not hasattr(lanes, "buffer"):
            lanes.buffer = memoryview(bytearray(_PIECE_BYTES))
            lanes.open = {}
        handle = lanes.open.get(file) or lanes.open.setdefault(file, file.open("rb", buffering=0))
        handle.seek(begin)
        handle.readinto(lanes.buffer)

    with ThreadPoolExecutor(num_threads()) as pool:
        began = time.perf_counter()
        for _ in pool.map(read, pieces):
            pass
        return time.perf_counter() - began


def _picture(width: int, height: int) -> bytes:
    """A picture with something in every part of it, as a PNG file."""
    noise = np.random.default_rng(3).integers(0, 256, (height // 20, width // 20, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=SHAPES, required=True)
    parser.add_argument("--dir", required=True, help="where to write the checkpoint; removed again")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eight-bits", action="store_true", help="dense matrices of layers in FP8")
    parser.add_argument("--small", action="store_true", help="a rehearsal")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--timed-tokens", type=int, default=128)
    parser.add_argument("--no-float32", action="store_true", help="where memory is short")
    parser.add_argument("--serve-last", action="store_true", help="where memory is short")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
