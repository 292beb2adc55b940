"""A full-size vision tower without a checkpoint, and its time on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from chiasm.plan import Grid
from encoder_svc.geometry import Geometry
from encoder_svc.models.qwen2_5_vl import Qwen25VisionTower, VisionConfig

QWEN_7B = VisionConfig(
    depth=32,
    hidden_size=1280,
    intermediate_size=3420,
    num_heads=16,
    out_hidden_size=3584,
    geometry=Geometry(patch=14, temporal_patch=2, merge=2),
    window_size=112,
    full_blocks=frozenset({7, 15, 23, 31}),
    rope_theta=10000.0,
)
TINY = VisionConfig(
    depth=2,
    hidden_size=64,
    intermediate_size=90,
    num_heads=2,
    out_hidden_size=48,
    geometry=Geometry(patch=14, temporal_patch=2, merge=2),
    window_size=112,
    full_blocks=frozenset({1}),
    rope_theta=10000.0,
)
"""For trying the script out where there is no GPU."""


def random_tower(
    config: VisionConfig, *, device: torch.device, dtype: torch.dtype, attention: str = "fused"
) -> Qwen25VisionTower:
    """Weights whose rows stay near one, as those of a trained tower do."""
    with torch.device("meta"):
        tower = Qwen25VisionTower(config, attention=attention)
    tower = tower.to_empty(device=device).to(dtype)
    generator = torch.Generator(device).manual_seed(1)
    for parameter in tower.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.normal_(mean=0.5, std=0.2, generator=generator)
    tower.finish()
    return tower.eval()


def random_patches(
    config: VisionConfig, grids: list[Grid], *, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    total = sum(grid.patches for grid in grids)
    generator = torch.Generator(device).manual_seed(2)
    size = (total, config.geometry.patch_values)
    return torch.randn(size, device=device, dtype=dtype, generator=generator)


def teraflops(config: VisionConfig, grids: list[Grid]) -> float:
    """Operations of one forward that no implementation can leave out, in 10^12."""
    width, inner = config.hidden_size, config.intermediate_size
    patches = sum(grid.patches for grid in grids)
    linear = 4 * width * width + 3 * width * inner
    joined = width * config.geometry.merge**2
    merger = joined * (joined + config.out_hidden_size) // config.geometry.merge**2
    total = 2.0 * patches * (config.depth * linear + merger + width * config.geometry.patch_values)
    window = (config.window_size // config.geometry.patch) ** 2
    for grid in grids:
        frame = grid.h * grid.w
        for index in range(config.depth):
            reach = frame if index in config.full_blocks else min(window, frame)
            total += 4.0 * grid.patches * reach * width
    return total / 1e12


def median_ms(call: Callable[[], object], *, device: torch.device, repeats: int) -> float:
    """Median of CUDA events around each call, or of the clock where there is no GPU."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    torch.cuda.synchronize(device)
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events)
