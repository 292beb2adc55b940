"""From files to tokens, once by our parts and once by transformers, for any family.

transformers is given the same token ids and the same pixel tensor. Ours go the way a request goes:
plan, pixels, tower, prompt, the wire's message, intake, engine.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, replace
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import torch

from chiasm.config.gateway import MediaConfig
from chiasm.plan import MediaPlan, Modality, Part, Promise, Span
from chiasm.v1 import common_pb2, decoder_pb2
from decoder_svc.config import TextConfig
from decoder_svc.engine.messages import AddRequest
from decoder_svc.intake import Intake as RequestIntake
from encoder_svc.geometry import resolve_run
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels.settings import read_settings
from encoder_svc.processor import Processor
from encoder_svc.runner import TowerRunner
from gateway.media import Intake
from gateway.messages import MediaOptions, MediaPart, Message, Role, TextPart
from gateway.planning.registry import planner_for
from gateway.prompt import PromptBuilder
from tests.unit.decoder.rig import SOURCE, EncoderAtHand

from transformers import AutoModelForImageTextToText  # isort: skip

NUM_TOKENS = 64
QUESTION = "What is in the picture?"
File = tuple[Modality, bytes]


@dataclass
class Prepared:
    """One prompt as our parts see it, and as transformers is given it."""

    ids: tuple[int, ...]
    plans: list[MediaPlan]
    runs: tuple[tuple[Span, ...], ...]
    rows: list[torch.Tensor]
    """Per medium, [rows, levels x hidden]."""
    patches: list[torch.Tensor]


class Served:
    """A checkpoint with our tower and prompt builder, and the reference."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        twin = path / "hf"  # of a layout that transformers does not read
        self.reference: Any = AutoModelForImageTextToText.from_pretrained(
            twin if twin.exists() else path, dtype=torch.float32
        ).eval()
        self.builder = PromptBuilder(path)
        self.runner = TowerRunner.load(path, device="cpu", dtype="float32", row_dtype="auto")

    def prepare(self, media: list[File], question: str = QUESTION) -> Prepared:
        """What gateway and encoder make of the files."""
        layouts, plans = asyncio.run(self._plan(media))
        parts = tuple(MediaPart(kind, None, data, "p") for kind, data in media)
        rendered = self.builder.render(
            [Message(Role.USER, (*parts, TextPart(question)))],
            scripts=[layout.script for layout in layouts],
        )
        expanded = self.builder.expand(rendered, [rows for one in layouts for rows in one.runs])
        processor = Processor(*read_settings(self.path, self.runner.geometry))
        rows, patches = [], []
        for plan, (_, data) in zip(plans, media, strict=True):
            made = self._encode(processor, plan, data)
            rows.append(made[0])
            patches.append(made[1])
        return Prepared(expanded.token_ids, plans, expanded.runs, rows, patches)

    async def _plan(self, media: list[File]) -> tuple[list[Any], list[MediaPlan]]:
        intake = Intake(MediaConfig())
        try:
            parts = [MediaPart(kind, None, data, "p") for kind, data in media]
            found = await intake.read(parts, [data for _, data in media])
        finally:
            await intake.close()
        planner = planner_for(self.path)
        layouts = [planner.plan(one.header, MediaOptions(), param="p") for one in found]
        plans = [
            replace(layout.to_plan(media_bytes=len(one.data)), digest=sha256(one.data).digest())
            for layout, one in zip(layouts, found, strict=True)
        ]
        return layouts, plans

    def _encode(
        self, processor: Processor, plan: MediaPlan, data: bytes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        job = EncodeJob(plan.digest, plan, None, Span(0, plan.num_rows), data)
        run = resolve_run(self.runner.geometry, plan, None, job.rows)
        made = list(processor.prepare(job, run.units(), threading.Event()))
        buffers = [b for unit in made for b in self.runner.run([unit], segment_rows=10**6)[0]]
        dtype = getattr(torch, self.runner.row_format.dtype)
        rows = torch.cat(
            [torch.frombuffer(bytearray(b.read(0, b.num_rows)), dtype=dtype) for b in buffers]
        )
        patches = torch.cat([torch.from_numpy(unit.patches) for unit in made])
        return rows.view(plan.num_rows, -1), patches

    def reference_inputs(self, made: Prepared) -> dict[str, Any]:
        """The keyword arguments of the reference's forward."""
        ids = torch.tensor([made.ids])
        kinds = torch.zeros_like(ids, dtype=torch.int)
        for plan, runs in zip(made.plans, made.runs, strict=True):
            for run in runs:
                kinds[0, run.begin : run.end] = 2 if plan.modality is Modality.VIDEO else 1
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": kinds,
        }
        if self.runner.geometry.tile:
            if made.plans:
                inputs["pixel_values"] = torch.cat([self._tiles(p) for p in made.patches])
            del inputs["mm_token_type_ids"]
            return inputs
        for modality, pixels, grid in (
            (Modality.IMAGE, "pixel_values", "image_grid_thw"),
            (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
        ):
            chosen = [i for i, plan in enumerate(made.plans) if plan.modality is modality]
            if chosen:
                inputs[pixels] = torch.cat([made.patches[i] for i in chosen])
                inputs[grid] = torch.tensor([shape(made.plans[i]) for i in chosen])
        seconds = [p.seconds_per_grid for p in made.plans if p.modality is Modality.VIDEO]
        if any(seconds) and "second_per_grid_ts" in signature(self.reference.forward).parameters:
            inputs["second_per_grid_ts"] = torch.tensor(seconds)
        return inputs

    def _tiles(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches by merge cell to pixels [tiles, channels, side, side]."""
        geometry = self.runner.geometry
        cells, m, p = geometry.tile // geometry.merge, geometry.merge, geometry.patch
        shape = (-1, cells, cells, m, m, geometry.channels, p, p)
        pixels = patches.view(shape).permute(0, 5, 1, 3, 6, 2, 4, 7)
        side = geometry.tile * p
        return pixels.reshape(-1, geometry.channels, side, side)

    @torch.inference_mode()
    def reference_rows(self, made: Prepared) -> list[torch.Tensor]:
        """The reference's rows, all levels, per medium."""
        found = []
        for plan, patches in zip(made.plans, made.patches, strict=True):
            if self.runner.geometry.tile:
                out = self.reference.model.get_image_features(self._tiles(patches))
                found.append(out.pooler_output.flatten(0, 1))
                continue
            t, height, width = shape(plan)
            frames = torch.tensor([[1, height, width]] * t)  # attention stays within a frame
            out = self.reference.model.get_image_features(patches, frames)
            deeper = getattr(out, "deepstack_features", None) or ()
            parts = (out.pooler_output, *deeper)  # by picture, or in earlier releases joined
            levels = [p if isinstance(p, torch.Tensor) else torch.cat(p) for p in parts]
            found.append(torch.cat(levels, dim=-1))
        return found

    @torch.inference_mode()
    def reference_answer(self, made: Prepared, masked: tuple[int, ...]) -> tuple[list[int], Any]:
        """Greedy tokens and the logits they were chosen by."""
        out = self.reference.generate(
            **self.reference_inputs(made),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            repetition_penalty=1.0,
            suppress_tokens=list(masked),
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences[0, len(made.ids) :].tolist(), torch.cat(out.logits)


class Engine(Protocol):
    """Who is asked: an engine with an encoder at hand."""

    text: TextConfig
    encoder: EncoderAtHand


def request(
    rig: Engine, request_id: str, made: Prepared, *, max_tokens: int = NUM_TOKENS
) -> AddRequest:
    """The engine's request, by way of the wire's message; its rows are told to the encoder."""
    promises = []
    for item, (plan, runs, rows) in enumerate(zip(made.plans, made.runs, made.rows, strict=True)):
        rig.encoder.rows[plan.digest] = rows
        parts = (Part(0, Span(0, plan.num_rows), SOURCE),)
        placeholders = runs if len(runs) > 1 else ()
        promises.append(Promise(item, plan, runs[0].begin, parts, placeholders).to_proto())
    start = decoder_pb2.GenerateStart(
        context=common_pb2.RequestContext(request_id=request_id),
        prompt_token_ids=made.ids,
        promises=promises,
        sampling=decoder_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    return RequestIntake(rig.text, max_model_len=4096, max_choices=1).admit(start)


def shape(plan: MediaPlan) -> list[int]:
    """A plan's grid, as the reference takes it."""
    grid = plan.grids[0]
    return [grid.t, grid.h, grid.w]
