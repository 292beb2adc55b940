"""An engine on a real tiny model with an encoder at hand: steps run when the test says so."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from chiasm.plan import Cause, Grid, MediaPlan, Modality, Part, Promise, Source, Span
from chiasm.rows import RowFormat
from chiasm.telemetry import DecoderMetrics
from decoder_svc.attention.reference import ReferenceAttention
from decoder_svc.config import TextConfig, read_text_config
from decoder_svc.embeddings.events import (
    Cancel,
    Failed,
    FetchCommand,
    FetchEvent,
    Grant,
    Landed,
    Open,
    Quiesced,
    Ready,
)
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.core import EngineCore
from decoder_svc.engine.mailbox import Mailbox
from decoder_svc.engine.messages import (
    AddRequest,
    ChoiceDone,
    Command,
    EngineLoad,
    Event,
    RequestDone,
    RequestFailed,
    StepEvents,
    Tokens,
)
from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.pool import KVPool
from decoder_svc.kv_cache.prefix import PrefixIndex
from decoder_svc.models.mrope import prompt_positions
from decoder_svc.models.stage import DecoderStage
from decoder_svc.parallel import ParallelMesh
from decoder_svc.runner.inline import InlineExecutor
from decoder_svc.runner.loading import Placement, load_stage
from decoder_svc.runner.model_runner import ModelRunner
from decoder_svc.runner.seats import SeatTable
from decoder_svc.sampling.drawn import Drawn
from decoder_svc.sampling.grammar import GrammarCompiler
from decoder_svc.sampling.grammar_masks import GrammarMasks
from decoder_svc.sampling.params import Draw, SamplingParams
from decoder_svc.sampling.sampler import Sampler
from decoder_svc.scheduler.budget import Limits
from decoder_svc.scheduler.scheduler import Scheduler

CPU = Placement(torch.device("cpu"), torch.float32)
SOURCE = Source(b"e" * 16, "encoder:1", 1)


@functools.cache
def loaded(model_dir: Path) -> tuple[TextConfig, DecoderStage]:
    text = read_text_config(model_dir)
    return text, load_stage(model_dir, text, ParallelMesh(), CPU)


def new_pool(text: TextConfig, num_blocks: int, block_size: int) -> KVPool:
    return KVPool(
        text,
        ParallelMesh(),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=torch.float32,
        device=CPU.device,
    )


class RecordingSampler(Sampler):
    """Keeps the raw logits of every step that sampled."""

    masks: GrammarMasks

    @classmethod
    def of(cls, model_dir: Path, text: TextConfig) -> RecordingSampler:
        masks = GrammarMasks(GrammarCompiler.of(model_dir, text), text.masked_token_ids)
        sampler = cls(text.masked_token_ids, device=CPU.device, grammars=masks)
        sampler.masks = masks
        return sampler

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> Drawn:
        self.seen: list[torch.Tensor] = [*getattr(self, "seen", []), logits.clone()]
        return super().sample(logits, draws)


class EncoderAtHand:
    """Answers fetches at once, segment by segment, from rows it was given by digest."""

    def __init__(self, slab: torch.Tensor, *, segment_rows: int, levels: int = 1) -> None:
        self.rows: dict[bytes, torch.Tensor] = {}
        self.silent = False
        self.num_opened = 0
        self.rows_sent = 0
        self._slab = slab
        self._segment_rows = segment_rows
        self._levels = levels
        self._dtype = str(slab.dtype).removeprefix("torch.")
        self._fetches: dict[bytes, Open] = {}

    def answer(self, commands: Iterable[FetchCommand]) -> list[FetchEvent]:
        return [event for command in commands for event in self._answer(command)]

    def _answer(self, command: FetchCommand) -> list[FetchEvent]:
        match command:
            case Open():
                return self._open(command)
            case Grant():
                fetch = self._fetches[command.fetch_id]
                row_bytes = self._slab.shape[1] * self._slab.itemsize
                for place in command.destinations:
                    rows = self.rows[fetch.digest][place.rows.begin : place.rows.end]
                    first = place.address // row_bytes
                    self._slab[first : first + len(rows)] = rows
                    self.rows_sent += len(rows)
                return [Landed(command.fetch_id, command.segment, command.seq)]
            case Cancel():
                return [Quiesced(command.fetch_id)]
        raise AssertionError(command)

    def _open(self, fetch: Open) -> list[FetchEvent]:
        self.num_opened += 1
        self._fetches[fetch.fetch_id] = fetch
        if self.silent:
            return []
        if fetch.digest not in self.rows:
            return [Failed(fetch.fetch_id, Cause.LOST, "unknown"), Quiesced(fetch.fetch_id)]
        form = RowFormat(self._slab.shape[1] // self._levels, self._levels, self._dtype)
        edges = [*range(fetch.rows.begin, fetch.rows.end, self._segment_rows), fetch.rows.end]
        spans = [Span(a, b) for a, b in zip(edges, edges[1:], strict=False)]
        return [Ready(fetch.fetch_id, i, span, form) for i, span in enumerate(spans)]


@dataclass
class Outcome:
    """What the engine said about one request."""

    events: list[Event] = field(default_factory=list)

    def tokens(self, choice: int = 0) -> list[int]:
        ids: list[int] = []
        for event in self.events:
            if isinstance(event, Tokens) and event.choice == choice:
                assert event.position == len(ids), "token positions have a gap"
                ids.extend(event.token_ids)
        return ids

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def done(self) -> RequestDone:
        (event,) = self.of(RequestDone)
        assert isinstance(event, RequestDone) and event is self.events[-1]
        return event

    @property
    def failure(self) -> Exception:
        (event,) = self.of(RequestFailed)
        assert isinstance(event, RequestFailed)
        return event.error

    @property
    def finished(self) -> dict[int, ChoiceDone]:
        return {event.choice: event for event in self.events if isinstance(event, ChoiceDone)}

    @property
    def over(self) -> bool:
        return bool(self.of(RequestDone) or self.of(RequestFailed))


class Rig:
    """One engine. Every step checks the invariants of scheduler, pages and receiver."""

    def __init__(
        self,
        model_dir: Path,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        chunk_tokens: int = 512,
        max_running: int = 32,
        prefix: bool = True,
        page_rows: int = 8,
        slab_pages: int = 64,
        segment_rows: int = 1000,
        ahead: bool = False,
    ) -> None:
        self.text, model = loaded(model_dir)
        levels = 1 + self.text.deepstack_levels
        slab = torch.zeros(page_rows * slab_pages, levels * self.text.hidden_size)
        self.encoder = EncoderAtHand(slab, segment_rows=segment_rows, levels=levels)
        pool = new_pool(self.text, num_blocks, block_size)
        self.sampler = RecordingSampler.of(model_dir, self.text)
        self.runner = ModelRunner(
            model,
            pool=pool,
            attention=ReferenceAttention(pool),
            seats=SeatTable(max_running, num_blocks, CPU.device),
            sampler=self.sampler,
            rows=slab,
        )
        self.runner.ahead = ahead
        self.metrics = DecoderMetrics()
        self.receiver = EmbeddingReceiver(
            pages=slab_pages, page_rows=page_rows, row_bytes=slab.shape[1] * 4
        )
        blocks = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            Limits(
                max_running=max_running,
                chunk_tokens=chunk_tokens,
                block_size=block_size,
                ahead=ahead,
                most_rows=self.runner.most_rows if ahead else 0,
            ),
            pool=blocks,
            receiver=self.receiver,
            prefix=PrefixIndex(blocks) if prefix else None,
            metrics=self.metrics,
        )
        self.blocks = blocks
        self.mailbox = Mailbox(self._take)
        self.now = 0.0
        self.core = EngineCore(
            scheduler=self.scheduler,
            receiver=self.receiver,
            executor=InlineExecutor(self.runner, depth=1 + ahead),
            mailbox=self.mailbox,
            metrics=self.metrics,
            clock=lambda: self.now,
        )
        self.outcomes: dict[str, Outcome] = {}
        self.load = EngineLoad()

    def _take(
        self,
        events: StepEvents,
        commands: Sequence[FetchCommand],
        load: EngineLoad,
    ) -> None:
        self.load = load
        for request_id, event in events:
            self.outcomes.setdefault(request_id, Outcome()).events.append(event)
        for event_back in self.encoder.answer(commands):
            self.mailbox.put(event_back)

    def put(self, command: Command) -> None:
        self.mailbox.put(command)

    def step(self) -> bool:
        busy = self.core.step()
        self.scheduler.check()
        self.receiver.check()
        return busy

    def run(self, *request_ids: str, most: int = 5000) -> Outcome:
        """Steps until the named requests, or all known ones, are over; the first one's outcome."""
        for _ in range(most):
            names = request_ids or tuple(self.outcomes)
            if names and all(self.outcomes.get(n, Outcome()).over for n in names):
                if not request_ids and self.load.waiting + self.load.running:
                    self.step()
                    continue
                return self.outcomes[names[0]]
            self.step()
        raise AssertionError(f"not over after {most} steps: {request_ids}")

    def generate(self, request_id: str = "r", **fields: object) -> Outcome:
        """One request from start to end."""
        self.put(make_request(self.text, request_id, **fields))  # type: ignore[arg-type]
        return self.run(request_id)


@dataclass(frozen=True)
class Medium:
    """A picture or clip: its grid in patches and its rows."""

    grid: Grid
    rows: torch.Tensor
    modality: Modality = Modality.IMAGE
    seconds_per_grid: float = 0.0
    name: str = "a"

    @property
    def digest(self) -> bytes:
        return (self.name.encode() * 32)[:32]


def make_request(
    text: TextConfig,
    request_id: str,
    *,
    prompt: Sequence[int | Medium],
    encoder: EncoderAtHand | None = None,
    part_rows: int | None = None,
    salt: bytes = b"",
    priority: int = 0,
    resume: tuple[tuple[int, ...], ...] = (),
    **sampling: object,
) -> AddRequest:
    """A request of text ids and media; media are announced to the encoder at hand."""
    ids: list[int] = []
    promises: list[Promise] = []
    for piece in prompt:
        if isinstance(piece, int):
            ids.append(piece)
            continue
        promises.append(promise_of(piece, len(promises), len(ids), part_rows))
        is_video = piece.modality is Modality.VIDEO
        pad = text.video_token_id if is_video else text.image_token_id
        ids.extend([pad] * len(piece.rows))
        if encoder is not None:
            encoder.rows[piece.digest] = piece.rows
    positions = prompt_positions(
        len(ids),
        promises,
        merge=text.spatial_merge_size,
        tokens_per_second=text.tokens_per_second,
    )
    return AddRequest(
        request_id=request_id,
        prompt_ids=tuple(ids),
        sampling=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling}),  # type: ignore[arg-type]
        promises=tuple(promises),
        grid_positions=positions.grid.tobytes() if promises else b"",
        position_delta=positions.delta,
        cache_salt=salt,
        priority=priority,
        resume=resume,
    )


def promise_of(medium: Medium, item: int, offset: int, part_rows: int | None = None) -> Promise:
    count = len(medium.rows)
    plan = MediaPlan(
        digest=medium.digest,
        family="qwen2_5_vl",
        modality=medium.modality,
        source_height=medium.grid.h * 14,
        source_width=medium.grid.w * 14,
        resized_height=medium.grid.h * 14,
        resized_width=medium.grid.w * 14,
        grids=(medium.grid,),
        num_rows=count,
        media_bytes=1,
        media_type="image/png",
        seconds_per_grid=medium.seconds_per_grid,
    )
    edges = [*range(0, count, part_rows or count), count]
    parts = tuple(
        Part(index, Span(a, b), SOURCE)
        for index, (a, b) in enumerate(zip(edges, edges[1:], strict=False))
    )
    return Promise(item, plan, offset, parts)
