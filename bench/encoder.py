"""The encoder on a GPU, part by part: one table against what the arithmetic allows.

    python -m bench.encoder                    ViT and pixels, on one GPU
    python -m bench.encoder --workers 2        the same engine on two GPUs, pictures and a clip
    python -m bench.encoder --profile          and where the ViT's time goes
    python -m bench.encoder --tiny             try it out on a CPU

Weights of Qwen2.5-VL-7B's tower are random, patches too: its time does not depend on them.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import PIL
import torch

from bench.encoder_load import Load, jpeg, picture, seconds, settings
from bench.tower import QWEN_7B, TINY, median_ms, random_patches, random_tower, teraflops
from chiasm.plan import Grid
from encoder_svc.graphs import GraphedTower
from encoder_svc.pixels.device import DevicePatchifier, PlannedFrame
from encoder_svc.pixels.image import decode_image
from encoder_svc.pixels.patches import Patchifier
from encoder_svc.runner import MAX_GRAPH_PATCHES

RATE = 745.0  # TFLOP/s of a large product in bfloat16, measured on the same kind of GPU
SIZES = {"1120x1120": Grid(1, 80, 80), "1920x1080": Grid(1, 78, 138)}
TINY_SIZES = {"140x196": Grid(1, 10, 14)}
BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts share."""

    tiny: bool
    repeats: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def tower_rows(bench: Bench, *, profile: bool) -> None:
    config = TINY if bench.tiny else QWEN_7B
    tower = random_tower(config, device=bench.device, dtype=bench.dtype)
    print("\n| ViT | batch | ms a picture | floor | TFLOP/s |\n|---|---|---|---|---|")
    for name, grid in (TINY_SIZES if bench.tiny else SIZES).items():
        for batch in BATCHES:
            grids = [grid] * batch
            patches = random_patches(config, grids, device=bench.device, dtype=bench.dtype)
            forward = _service_forward(tower, bench.device)
            ms = median_ms(
                lambda f=forward, p=patches, g=grids: f(p, g),
                device=bench.device,
                repeats=bench.repeats,
            )
            work = teraflops(config, grids)
            print(
                f"| {name} | {batch} | {ms / batch:.2f} | {work / batch / RATE * 1e3:.1f} "
                f"| {work / ms * 1e3:.0f} |",
                flush=True,
            )
            if profile and bench.device.type == "cuda":
                _profile(lambda p=patches, g=grids: tower(p, g))


def _service_forward(tower: torch.nn.Module, device: torch.device) -> Callable[..., torch.Tensor]:
    """As the service runs it: a graph where the batch is small enough."""
    if device.type != "cuda":
        return tower
    return GraphedTower(tower, keep=1, max_patches=MAX_GRAPH_PATCHES)  # type: ignore[arg-type]


def _profile(call: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity, profile

    call()
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"    kernels together {total / 1e3:.2f} ms")
    for row in rows[:12]:
        print(f"    {row.device_time_total / 1e3:8.3f} ms  {row.count:4d} x  {row.key[:90]}")


def pixel_rows(bench: Bench) -> None:
    height, width = (108, 192) if bench.tiny else (1080, 1920)
    planned = (112, 196) if bench.tiny else (1092, 1932)
    maker = DevicePatchifier(settings(), device=bench.device, dtype=bench.dtype)
    plain = Patchifier(settings())
    print("\n| preprocessing of one JPEG, ms | photograph-like | noise |\n|---|---|---|")
    columns = [
        _stages(jpeg(picture(height, width, noise=noise)), (height, width), planned, maker, plain)
        for noise in (False, True)
    ]
    for stage in columns[0]:
        print(f"| {stage} | " + " | ".join(f"{column[stage]:.2f}" for column in columns) + " |")


def _stages(
    file: bytes,
    size: tuple[int, int],
    planned: tuple[int, int],
    maker: DevicePatchifier,
    plain: Patchifier,
) -> dict[str, float]:
    decode = lambda: decode_image(file, "image/jpeg", height=size[0], width=size[1])  # noqa: E731
    image = decode()
    to = {"height": planned[0], "width": planned[1]}
    frame = maker.resize(image, **to)

    def on_device(frame: PlannedFrame) -> torch.Tensor:
        patches = maker.patchify([frame]).ready()
        if patches.is_cuda:
            torch.cuda.synchronize()
        return patches

    found = on_device(frame)
    expected = torch.from_numpy(plain.patchify([plain.resize(image, **to)]))
    assert torch.equal(found.cpu(), expected.to(found.dtype)), "the device makes other patches"
    return {
        "size of the file, MB": len(file) / 1e6,
        "decode": _median(decode),
        "to bytes": _median(lambda: np.asarray(image)),
        "upload, resize, normalise, cut on the device": _median(lambda: on_device(frame)),
        "all of it": _median(lambda: on_device(maker.resize(decode(), **to))),
        "all of it on the CPU, as without a GPU": _median(
            lambda: plain.patchify([plain.resize(decode(), **to)]), repeats=3
        ),
    }


def _median(call: Callable[[], object], *, repeats: int = 15) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def worker_rows(bench: Bench, workers: int) -> None:
    """The engine with its pool and queues, without rpcs: JPEG files in, rows out."""
    pictures, frames = (8, 16) if bench.tiny else (240, 256)
    size = (112, 196) if bench.tiny else (1120, 1120)
    loads = [
        Load(kind, count, size=size, workers=number, tiny=bench.tiny)
        for kind, count in (("pictures", pictures), ("clip", frames))
        for number in (1, workers)
    ]
    one, many, whole, cut = seconds(loads)
    rates = pictures / one, workers * pictures / many
    print(f"\n| engine, JPEG files to rows | 1 GPU | {workers} GPUs | times |\n|---|---|---|---|")
    print(
        f"| {size[1]}x{size[0]}, pictures/s | {rates[0]:.1f} | {rates[1]:.1f} "
        f"| {rates[1] / rates[0]:.2f} |"
    )
    print(f"| a clip of {frames} frames, s | {whole:.3f} | {cut:.3f} | {whole / cut:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--profile", action="store_true", help="kernels of each forward")
    parser.add_argument("--workers", type=int, default=0, help="compare 1 worker with so many")
    parser.add_argument("--only", choices=("tower", "pixels"), help="one part alone")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    bench = Bench(tiny=options.tiny, repeats=options.repeats)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else platform.processor()
    print(f"{name}, torch {torch.__version__}, Pillow {PIL.__version__}, {bench.dtype}")
    if options.workers:
        worker_rows(bench, options.workers)
        return
    with torch.inference_mode():
        if options.only != "pixels":
            tower_rows(bench, profile=options.profile)
        if options.only != "tower":
            pixel_rows(bench)


if __name__ == "__main__":
    main()
