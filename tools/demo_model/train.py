"""Trains the demo model; may be stopped and resumed, and follows a schedule of wall-clock time.

Worker processes draw ahead; a replay of recent batches keeps the device busy between them.
"""

from __future__ import annotations

import argparse
import collections
import math
import multiprocessing
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tools.demo_model import spec
from tools.demo_model.batches import SHAPES, Batch, DrawnBatches, Style, make_batch
from tools.demo_model.model import DemoModel, initialise
from tools.demo_model.step import Meter, Stepper, forward
from tools.demo_model.tasks import Mix
from tools.demo_model.weights import save_weights

MAX_REPLAY = 500
LOG_EVERY = 100
SAVE_EVERY_S = 110.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    out: Path
    resume: Path | None
    minutes: float
    total_minutes: float
    workers: int
    scale: float
    learning_rate: float
    seed: str
    compiled: bool
    evaluation_batches: int
    mix: Mix


@dataclass(slots=True)
class Progress:
    """Where the run stands; saved with the weights."""

    seconds: float = 0.0
    steps: int = 0
    level: float = 0.0


class Feed:
    """Moves drawn batches to the device in a thread and mixes fresh ones with recent ones."""

    def __init__(self, loader: DataLoader[Batch], device: torch.device, seed: str) -> None:
        self._batches = iter(loader)
        self._device = device
        self._rng = random.Random(seed)
        self._fresh: collections.deque[Batch] = collections.deque()
        self._recent: collections.deque[Batch] = collections.deque(maxlen=MAX_REPLAY)
        self._closed = False
        self.num_drawn = 0
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        while not self._closed:
            if len(self._fresh) > 8:
                time.sleep(0.005)
                continue
            drawn = next(self._batches)
            with torch.cuda.stream(stream):
                moved = drawn.to(self._device)
            if stream is not None:
                stream.synchronize()
            self._fresh.append(moved)
            self.num_drawn += 1

    def take(self) -> Batch:
        """Give a fresh batch if there is one, else one seen lately."""
        while not self._fresh and not self._recent:
            time.sleep(0.01)
        if self._fresh:
            batch = self._fresh.popleft()
            self._recent.append(batch)
        else:
            batch = self._recent[self._rng.randrange(len(self._recent))]
        if self._device.type == "cuda":
            for tensor in batch.tensors():
                tensor.record_stream(torch.cuda.current_stream())
        return batch

    def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        self._thread.join(timeout=20)


def learning_rate(options: Options, progress: Progress) -> float:
    """Warm up over 200 steps, then follow a cosine of the time used down to nearly nothing."""
    share = min(1.0, progress.seconds / (60 * options.total_minutes))
    warm = min(1.0, (progress.steps + 1) / 200)
    return options.learning_rate * warm * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * share)))


def next_level(options: Options, progress: Progress, number_exact: float) -> float:
    """Make numbers harder once they are read, and in any case with time."""
    share = progress.seconds / (60 * options.total_minutes)
    earned = progress.level + (0.05 if number_exact > 0.6 else 0.0)
    return min(1.0, max(earned, (share - 0.15) / 0.3))


def make_optimizer(model: DemoModel) -> torch.optim.AdamW:
    """Decay matrices only."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    device = matrices[0].device
    rate = torch.zeros((), device=device)
    return torch.optim.AdamW(
        groups, lr=rate, betas=(0.9, 0.98), fused=True, capturable=device.type == "cuda"
    )


def save_state(
    options: Options, model: DemoModel, optimizer: torch.optim.AdamW, progress: Progress
) -> None:
    """Write what a later call resumes from; the moments are rounded, so that no file is large."""
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    facts = (progress.seconds, progress.steps, progress.level)
    torch.save({"weights": weights, "progress": facts}, options.out / "state.pt")
    moments = [
        {
            key: value.to("cpu", torch.bfloat16) if key != "step" else value.cpu()
            for key, value in entry.items()
        }
        for entry in optimizer.state_dict()["state"].values()
    ]
    torch.save(moments, options.out / "moments.pt")
    save_weights(model, options.out)


def load_state(folder: Path, model: DemoModel, optimizer: torch.optim.AdamW) -> Progress:
    """Read what `save_state` wrote."""
    saved = torch.load(folder / "state.pt")
    model.load_state_dict(saved["weights"])
    moments = torch.load(folder / "moments.pt")
    state = optimizer.state_dict()
    state["state"] = {
        index: {key: value.float() for key, value in entry.items()}
        for index, entry in enumerate(moments)
    }
    optimizer.load_state_dict(state)
    return Progress(*saved["progress"])


def report(line: str, options: Options) -> None:
    """Print a line and keep it in the log."""
    print(line, flush=True)
    with (options.out / "train.log").open("a") as log:
        log.write(line + "\n")


def describe(meter: Meter) -> tuple[str, float]:
    """Give a log line of all tasks, and how many numbers are read right."""
    values = meter.read()
    parts = [
        f"{task} {loss:.3f}/{exact:.3f}" for task, (loss, exact, rows) in values.items() if rows
    ]
    return "  ".join(parts), values["number"][1]


def train(
    options: Options,
    model: DemoModel,
    optimizer: torch.optim.AdamW,
    progress: Progress,
    device: torch.device,
) -> None:
    """Train for the minutes of this call."""
    level = multiprocessing.Value("d", progress.level)
    stream = DrawnBatches(
        seed=f"train-{options.seed}-{progress.steps}",
        level=level,
        scale=options.scale,
        mix=options.mix,
    )
    loader = DataLoader(stream, batch_size=None, num_workers=options.workers, prefetch_factor=2)
    feed, meter = Feed(loader, device, options.seed), Meter(device)
    stepper = Stepper(model, optimizer, meter, device)
    first = feed.take()  # the workers are up: only now does the clock start
    began, saved, earlier = time.monotonic(), time.monotonic(), progress.seconds
    report(f"first batch: {first.shape} {tuple(first.ids.shape)}", options)
    while time.monotonic() - began < 60 * options.minutes:
        batch = feed.take()
        for group in optimizer.param_groups:
            group["lr"].fill_(learning_rate(options, progress))
        stepper.take(batch)
        progress.steps += 1
        if progress.steps % LOG_EVERY == 0:
            tasks, number_exact = describe(meter)
            progress.seconds = earlier + time.monotonic() - began
            progress.level = next_level(options, progress, number_exact)
            level.value = progress.level
            facts = f"{progress.steps} {progress.seconds:.0f}s drawn {feed.num_drawn}"
            facts += f" graphs {stepper.num_graphs} level {progress.level:.2f}"
            report(f"{facts}  {tasks}", options)
        if time.monotonic() - saved > SAVE_EVERY_S:
            saved = time.monotonic()
            save_state(options, model, optimizer, progress)
    progress.seconds = earlier + time.monotonic() - began
    feed.close()


def _unseen(job: tuple[str, int, int]) -> Batch:
    torch.set_num_threads(1)
    kind, index, size = job
    rng = random.Random(f"evaluate-{kind}-{index}")
    return make_batch(rng, rng.choice(SHAPES[kind]), size, Style())


def evaluate(options: Options, model: DemoModel, device: torch.device) -> None:
    """Report exact answers on unseen seeds, in fp32 with the weights rounded as shipped."""
    rounded = DemoModel().to(device)
    rounded.load_state_dict(
        {name: value.to(torch.bfloat16).float() for name, value in model.state_dict().items()}
    )
    meter = Meter(device)
    kinds = ("one", "one", "one", "two", "clip") * options.evaluation_batches
    jobs = [
        (kind, index, max(4, int(128 * options.scale)))
        for index, kind in enumerate((*kinds, "text"))
    ]
    with (
        multiprocessing.get_context("spawn").Pool(max(1, options.workers)) as pool,
        torch.no_grad(),
    ):
        for drawn in pool.imap_unordered(_unseen, jobs):
            batch = drawn.to(device)
            meter.add(batch, *forward(rounded, batch, noise=0.0))
    for task, (loss, exact, rows) in meter.read().items():
        report(f"unseen {task:8s} exact {exact:.4f} of {rows}, loss {loss:.4f}", options)


def parse() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--total-minutes", type=float, default=18.0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full batch size")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--evaluation-batches", type=int, default=8)
    parser.add_argument("--mix", type=Mix, choices=tuple(Mix), default=Mix.BROAD)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Train, save, evaluate."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = DemoModel()
    initialise(model, seed=0)
    model.to(device)
    optimizer = make_optimizer(model)
    progress = load_state(options.resume, model, optimizer) if options.resume else Progress()
    if options.compiled:
        for block in (*model.visual.blocks, *model.model.layers):
            block.compile(dynamic=True)
    num_weights = sum(weight.numel() for weight in model.parameters())
    report(f"{num_weights} weights on {device}, {spec.NUM_LAYERS} layers", options)
    train(options, model, optimizer, progress, device)
    save_state(options, model, optimizer, progress)
    torch.set_float32_matmul_precision("highest")
    evaluate(options, model, device)


if __name__ == "__main__":
    main()
