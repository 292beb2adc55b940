"""The whole path, files to tokens, against transformers: plan, pixels, tower, prompt, engine.

transformers is given the same token ids and the same pixel tensor. Float32 on CPU; the table of the
largest differences is printed at the end of the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from chiasm.checkpoint import resolve_model
from chiasm.config.gateway import MediaConfig
from chiasm.plan import Grid, MediaPlan, Modality, Span
from encoder_svc.geometry import resolve_run
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels.settings import read_settings
from encoder_svc.processor import Processor
from encoder_svc.runner import TowerRunner
from gateway.media import Intake
from gateway.messages import MediaOptions, MediaPart, Message, Role, TextPart
from gateway.planning.registry import planner_for
from gateway.prompt import PromptBuilder
from tests.checkpoints import save_tiny_qwen
from tests.integration.media import circle, clip, encode
from tests.unit.decoder.rig import Medium, Rig

torch.set_num_threads(1)
from transformers import Qwen2_5_VLForConditionalGeneration  # noqa: E402

NUM_TOKENS = 64
TOLERANCE = 1e-4
CHECKPOINTS = {
    "demo": None,
    "tied, 2 KV heads": {"tied": True, "kv_heads": 2},
    "tied, 4 KV heads": {"tied": True, "kv_heads": 4},
    "untied, 2 KV heads": {"tied": False, "kv_heads": 2},
    "untied, 4 KV heads": {"tied": False, "kv_heads": 4},
}


def picture(width: int, height: int, colour: str = "red") -> tuple[Modality, bytes]:
    return Modality.IMAGE, encode(circle(colour, (width, height)))


PROMPTS: dict[str, list[tuple[Modality, bytes]]] = {
    "28x28": [(Modality.IMAGE, encode(Image.new("RGB", (28, 28), "blue")))],
    "1000x2530": [picture(1000, 2530)],
    "4 pictures": [
        picture(224, 224),
        picture(112, 300, "blue"),
        picture(500, 180),
        picture(64, 64),
    ],
    "17-frame clip": [(Modality.VIDEO, clip(17, fps=2))],
    "text only": [],
}


@dataclass
class Ours:
    """One prompt as our parts see it, and as transformers is given it."""

    ids: tuple[int, ...]
    prompt: list[int | Medium]
    plans: list[MediaPlan]
    patches: list[torch.Tensor]


@dataclass
class Served:
    name: str
    path: Path
    reference: Any
    runner: TowerRunner


@pytest.fixture(scope="module", params=CHECKPOINTS, name="served")
def served_(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    options = CHECKPOINTS[request.param]
    path = (
        resolve_model("demo")
        if options is None
        else save_tiny_qwen(tmp_path_factory.mktemp("tiny"), **options)
    )
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    runner = TowerRunner.load(path, device="cpu", dtype="float32", row_dtype="auto")
    return Served(request.param, path, reference.eval(), runner)


async def read(path: Path, media: list[tuple[Modality, bytes]]) -> list[MediaPlan]:
    intake = Intake(MediaConfig())
    try:
        parts = [MediaPart(kind, None, data, "p") for kind, data in media]
        found = await intake.read(parts, [data for _, data in media])
    finally:
        await intake.close()
    planner = planner_for(path)
    layouts = [planner.plan(one.header, MediaOptions(), param="p") for one in found]
    return [
        replace(layout.to_plan(media_bytes=len(one.data)), digest=bytes([index]) * 32)
        for index, (layout, one) in enumerate(zip(layouts, found, strict=True))
    ]


def prepare(served: Served, media: list[tuple[Modality, bytes]]) -> Ours:
    """What gateway and encoder make of the files."""
    plans = asyncio.run(read(served.path, media))
    parts = tuple(MediaPart(kind, None, data, "p") for kind, data in media)
    question = TextPart("What is in the picture?")
    prompts = PromptBuilder(served.path)
    rendered = prompts.render([Message(Role.USER, (*parts, question))])
    expanded = prompts.expand(rendered, [plan.num_rows for plan in plans])
    processor = Processor(*read_settings(served.path))
    prompt: list[int | Medium] = []
    patches: list[torch.Tensor] = []
    done = 0
    for plan, offset, (_, data) in zip(plans, expanded.offsets, media, strict=True):
        job = EncodeJob(plan.digest, plan, None, Span(0, plan.num_rows), data)
        run = resolve_run(served.runner.geometry, plan, None, job.rows)
        made = list(processor.prepare(job, run.units(), threading.Event()))
        rows = [
            torch.frombuffer(bytearray(buffer.read(0, buffer.num_rows)), dtype=torch.float32)
            for unit in made
            for buffer in served.runner.run([unit], segment_rows=10**6)[0]
        ]
        hidden = served.runner.row_format.hidden_size
        prompt += expanded.token_ids[done:offset]
        prompt.append(
            Medium(
                plan.grids[0],
                torch.cat(rows).view(-1, hidden),
                plan.modality,
                plan.seconds_per_grid,
                name=f"{offset:032d}",
            )
        )
        patches.append(torch.cat([torch.from_numpy(unit.patches) for unit in made]))
        done = offset + plan.num_rows
    prompt += expanded.token_ids[done:]
    return Ours(expanded.token_ids, prompt, plans, patches)


def reference_inputs(served: Served, ours: Ours) -> dict[str, Any]:
    config = served.reference.config
    ids = torch.tensor([ours.ids])
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": kinds,
    }
    for modality, pixels, grid in (
        (Modality.IMAGE, "pixel_values", "image_grid_thw"),
        (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [i for i, plan in enumerate(ours.plans) if plan.modality is modality]
        if chosen:
            inputs[pixels] = torch.cat([ours.patches[i] for i in chosen])
            inputs[grid] = torch.tensor([shape(ours.plans[i].grids[0]) for i in chosen])
    seconds = [p.seconds_per_grid for p in ours.plans if p.modality is Modality.VIDEO]
    if seconds:
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    return inputs


def shape(grid: Grid) -> list[int]:
    return [grid.t, grid.h, grid.w]


@pytest.mark.parametrize("name", PROMPTS)
def test_files_to_tokens(
    served: Served, name: str, record_property: Callable[[str, object], None]
) -> None:
    ours = prepare(served, PROMPTS[name])
    inputs = reference_inputs(served, ours)
    worst_rows = 0.0
    media = [piece for piece in ours.prompt if isinstance(piece, Medium)]
    for medium, patches in zip(media, ours.patches, strict=True):
        with torch.inference_mode():
            theirs = served.reference.model.visual(
                patches, grid_thw=torch.tensor([shape(medium.grid)])
            ).pooler_output
        worst_rows = max(worst_rows, float((medium.rows - theirs).abs().max()))
    rig = Rig(served.path, chunk_tokens=48, num_blocks=512, page_rows=64, segment_rows=100)
    got = rig.generate(prompt=ours.prompt, encoder=rig.encoder, max_tokens=NUM_TOKENS)
    with torch.inference_mode():
        expected = served.reference.generate(
            **inputs,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            repetition_penalty=1.0,
            suppress_tokens=list(rig.text.masked_token_ids),
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = expected.sequences[0, len(ours.ids) :].tolist()
    worst_logits = float((rig.sampler.seen[0] - expected.logits[0]).abs().max())
    record_property(
        "parity",
        f"{served.name:28} {name:15} {len(ours.ids):6d} {worst_rows:9.1e} {worst_logits:9.1e} "
        f"{sum(a == b for a, b in zip(got.tokens(), ids, strict=True)):6d}/{len(ids)}",
    )
    assert worst_rows <= TOLERANCE
    assert worst_logits <= TOLERANCE
    assert got.tokens() == ids
