"""A decoder's engine over ranks in processes, stepped by the test; an encoder is at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from chiasm.config.decoder import DecoderConfig, MemoryConfig, ParallelConfig, SchedulerConfig
from chiasm.plan import Cause, Grid, Modality
from chiasm.telemetry import DecoderMetrics
from decoder_svc.assembly import build_engine, load_parts
from decoder_svc.config import read_text_config
from decoder_svc.embeddings.events import FetchCommand
from decoder_svc.engine.mailbox import Mailbox
from decoder_svc.engine.messages import (
    AddRequest,
    EngineLoad,
    PartFailed,
    RedirectPart,
    StepEvents,
)
from decoder_svc.runner.loading import slab_rows
from tests.unit.decoder.rig import SOURCE, EncoderAtHand, Medium, Outcome, make_request


class LaidOut:
    """One decoder without its rpcs, at `tp_size` x `pp_size`."""

    def __init__(  # noqa: PLR0913
        self,
        model_dir: Path,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        ep_size: int = 1,
        chunk: int = 48,
        prefix: bool = True,
        ahead: bool = False,
        device: str = "cpu",
    ) -> None:
        config = DecoderConfig(
            model=str(model_dir),
            parallel=ParallelConfig(tp_size=tp_size, pp_size=pp_size, ep_size=ep_size),
            memory=MemoryConfig(kv_blocks=128, slab_bytes=1 << 20, slab_page_rows=8),
            scheduler=SchedulerConfig(
                chunked_prefill_size=chunk,
                prefix_cache=prefix,
                max_running_requests=32,
                async_scheduling="on" if ahead else "off",
            ),
            num_threads=1,
            device=device,
            dtype="float32",
        )
        self.open(config, model_dir, segment_rows=6)

    def open(self, config: DecoderConfig, model_dir: Path, *, segment_rows: int) -> None:
        """Loads the parts and joins them."""
        self.text = read_text_config(model_dir)
        self.parts = load_parts(config, self.text, model_dir)
        rows = slab_rows(self.parts.slab.view(), self.parts.rows)
        self.encoder = EncoderAtHand(rows, segment_rows=segment_rows, levels=self.parts.rows.levels)
        self.mailbox = Mailbox(self._take)
        self.core = build_engine(config, self.parts, self.mailbox, DecoderMetrics())
        self.outcomes: dict[str, Outcome] = {}
        self.load = EngineLoad()
        self.num_steps = 0

    def _take(
        self,
        events: StepEvents,
        commands: Sequence[FetchCommand],
        load: EngineLoad,
    ) -> None:
        self.load = load
        for request_id, event in events:
            self.outcomes[request_id].events.append(event)
            if isinstance(event, PartFailed) and event.cause is Cause.PREEMPTED:
                again = (event.item, event.part, event.attempt + 1, SOURCE)
                self.mailbox.put(RedirectPart(request_id, *again))
        for event_back in self.encoder.answer(commands):
            self.mailbox.put(event_back)

    def put(self, add: AddRequest) -> None:
        self.outcomes[add.request_id] = Outcome()
        self.mailbox.put(add)

    def run(self, *, within_s: float = 60.0, at_step: Callable[[int], None] | None = None) -> None:
        """Steps until every request is over."""
        deadline = time.monotonic() + within_s
        while not all(outcome.over for outcome in self.outcomes.values()):
            assert time.monotonic() < deadline, f"not over after {within_s} s: {self.load}"
            self.num_steps += 1
            if at_step is not None:
                at_step(self.num_steps)
            if not self.core.step_safely():
                self.mailbox.wait(0.02)

    def answers(self) -> dict[str, list[list[int]]]:
        """Ids by request and choice."""
        return {
            name: [outcome.tokens(choice) for choice in outcome.finished]
            for name, outcome in self.outcomes.items()
        }

    def close(self) -> None:
        self.parts.executor.close()
        del self.encoder
        self.parts.slab.close()


def ask_everything(engine: LaidOut, *, max_tokens: int = 10) -> None:
    """Twelve requests of every kind, all at once."""
    text, encoder = engine.text, engine.encoder
    noise = torch.Generator().manual_seed(5)

    def medium(name: str, t: int, h: int, w: int) -> Medium:
        rows = torch.randn(t * h * w // 4, text.hidden_size, generator=noise)
        kind = Modality.VIDEO if t > 1 else Modality.IMAGE
        return Medium(Grid(t, h, w), rows, kind, 0.5 if t > 1 else 0.0, name)

    words = list(range(40, 140))
    cat, dog, clip = medium("c", 1, 4, 8), medium("d", 1, 8, 4), medium("v", 3, 4, 4)
    seeded = {"temperature": 0.9, "top_p": 0.95}
    asked: dict[str, tuple[list[int | Medium], dict[str, object]]] = {
        "text": (words[:7], {}),
        "long": (words * 2, {}),
        "one": (words[:1], {}),
        "same": (words[:7], {}),
        "picture": ([*words[:3], cat, *words[3:9]], {}),
        "again": ([*words[:3], cat, *words[3:7]], {}),
        "two": ([words[0], cat, words[1], dog, *words[2:6]], {}),
        "clip": ([*words[:4], clip, *words[4:8]], {}),
        "seeded": (words[10:20], {**seeded, "seed": 7}),
        "choices": ([words[3], dog, *words[20:26]], {**seeded, "seed": 2**63 + 1, "n": 2}),
        "penalties": (words[5:15], {"repetition_penalty": 1.4, "frequency_penalty": 0.5}),
        "logprobs": (words[30:44], {"top_logprobs": 3}),
    }
    for name, (prompt, sampling) in asked.items():
        engine.put(
            make_request(
                text,
                name,
                prompt=prompt,
                encoder=encoder,
                **{"max_tokens": max_tokens, **sampling},
            )
        )
