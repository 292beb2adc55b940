"""The engine's policy without torch: pages, slab and model are simulated exactly.

A page remembers which token (and which row of which medium) was written to each place. A "model"
draws tokens as a checksum over everything a sequence sees through its block table, so a wrong page,
row, position or order gives a wrong answer. `expected` computes the right one from the request.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from chiasm.plan import Cause, Grid, MediaPlan, Modality, Part, Promise, Source, Span
from chiasm.rows import RowFormat
from chiasm.telemetry import DecoderMetrics
from decoder_svc.embeddings.events import (
    Cancel,
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
    NO_PAGE,
    PENDING,
    AddRequest,
    DecodeRows,
    EngineLoad,
    Event,
    PartFailed,
    PlannedSequence,
    RedirectPart,
    RequestDone,
    RequestFailed,
    StepEvents,
    StepPlan,
    StepResult,
    Tokens,
)
from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.prefix import PrefixIndex
from decoder_svc.runner.executor import Executor
from decoder_svc.runner.rows import columns_of
from decoder_svc.sampling.params import Draw, Sampled, SamplingParams
from decoder_svc.scheduler.budget import Limits, landed_chunk
from decoder_svc.scheduler.scheduler import Scheduler

PAD = 9
SOURCE = Source(b"e" * 16, "encoder:1", 1)
ROWS = RowFormat(1, 1, "float32")

Seen = tuple[int, bytes, int]  # token id, and digest and row where a medium's row replaced it


def draw(history: Sequence[Seen], choice: int) -> int:
    return 10 + zlib.crc32(repr((list(history), choice)).encode()) % 90


@dataclass(frozen=True)
class Picture:
    name: str
    num_rows: int

    @property
    def digest(self) -> bytes:
        return (self.name.encode() * 32)[:32]


def make_request(
    request_id: str,
    prompt: Sequence[int | Picture],
    *,
    max_tokens: int = 4,
    n: int = 1,
    priority: int = 0,
    part_rows: int | None = None,
    resume: tuple[tuple[int, ...], ...] = (),
    salt: bytes = b"",
) -> AddRequest:
    ids: list[int] = []
    promises: list[Promise] = []
    for piece in prompt:
        if isinstance(piece, int):
            ids.append(piece)
            continue
        count = piece.num_rows
        plan = MediaPlan(
            digest=piece.digest,
            family="qwen2_5_vl",
            modality=Modality.IMAGE,
            source_height=28,
            source_width=28 * count,
            resized_height=28,
            resized_width=28 * count,
            grids=(Grid(1, 2, 2 * count),),
            num_rows=count,
            media_bytes=1,
            media_type="image/png",
        )
        edges = [*range(0, count, part_rows or count), count]
        parts = tuple(
            Part(i, Span(a, b), SOURCE)
            for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))
        )
        promises.append(Promise(len(promises), plan, len(ids), parts))
        ids.extend([PAD] * count)
    return AddRequest(
        request_id=request_id,
        prompt_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0),
        promises=tuple(promises),
        priority=priority,
        resume=resume,
        cache_salt=salt,
    )


def expected(add: AddRequest, choice: int = 0) -> list[int]:
    history: list[Seen] = [(token, b"", 0) for token in add.prompt_ids]
    for promise in add.promises:
        for row in range(promise.plan.num_rows):
            history[promise.prompt_offset + row] = (PAD, promise.plan.digest, row)
    answer: list[int] = []
    while len(answer) < add.sampling.max_tokens:
        answer.append(draw(history, choice))
        history.append((answer[-1], b"", 0))
    return answer


class SimulatedRanks(Executor):
    """Computes a plan when it is collected, as late as a pipeline would."""

    def __init__(
        self, *, block_size: int, depth: int = 1, ahead: bool = False, most_rows: int = 0
    ) -> None:
        self.depth = depth + ahead
        self.most_rows = most_rows
        self.num_in_columns = 0
        self._seated: dict[int, PlannedSequence] = {}
        self.slab: dict[int, tuple[bytes, int]] = {}
        self.fail_on: set[str] = set()
        self.nan_on: set[str] = set()
        self.most_given_up = 0  # steps that the engine may have forgotten, and still come back
        self.num_steps = 0
        self._size = block_size
        self._pages: dict[tuple[int, int], Seen] = {}
        self._tables: dict[int, list[int]] = {}
        self._drawn: dict[int, int] = {}
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert len(self._plans) < self.depth + self.most_given_up, "more in flight than is allowed"
        lengths = [len(s.token_ids) for s in plan.sequences]
        assert lengths == sorted(lengths, key=lambda length: length > 1), "single tokens first"
        if plan.decodes is not None:
            self.num_in_columns += 1
            plan = StepPlan(plan.step, self._unpacked(plan.decodes) + plan.sequences)
        for sequence in plan.sequences:
            self._seated[sequence.seat] = sequence
        self._plans.append(plan)

    def _unpacked(self, rows: DecodeRows) -> tuple[PlannedSequence, ...]:
        found = []
        for token, seat, start, position, number, page in columns_of(rows).T.tolist():
            before = self._seated[seat]
            found.append(
                PlannedSequence(
                    request_id=before.request_id,
                    choice=before.choice,
                    seat=seat,
                    token_ids=(token,),
                    start=start,
                    position=position,
                    block_table=() if number == NO_PAGE else (page,),
                    first_block=max(number, 0),
                    draw=before.draw or Draw(SamplingParams(max_tokens=1), before.choice, 0),
                )
            )
        return tuple(found)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        self.num_steps += 1
        if self.fail_on & {s.request_id for s in plan.sequences}:
            self._plans.clear()
            raise RuntimeError("a rank failed")
        sampled = []
        for sequence in plan.sequences:
            rows: dict[int, tuple[bytes, int]] = {}
            for span in sequence.embeds:
                at = span.offset
                for run in span.runs:
                    for row in range(run.first_slab_row, run.first_slab_row + run.num_rows):
                        rows[at] = self.slab[row]
                        at += 1
            table = self._tables.setdefault(sequence.seat, [])
            if sequence.block_table:
                table[sequence.first_block :] = sequence.block_table
            ids = sequence.token_ids
            if ids == (PENDING,):
                ids = (self._drawn[sequence.seat],)
            for index, token in enumerate(ids):
                place = sequence.start + index
                assert (token == PAD) == (index in rows), "a placeholder without its row"
                key = (table[place // self._size], place % self._size)
                self._pages[key] = (token, *rows.get(index, (b"", 0)))
            if sequence.draw is not None:
                end = sequence.start + len(sequence.token_ids)
                history = [self._pages[table[i // self._size], i % self._size] for i in range(end)]
                bad = sequence.request_id in self.nan_on
                sampled.append(Sampled(draw(history, sequence.choice), finite=not bad))
                self._drawn[sequence.seat] = sampled[-1].token_id
        if all(one.finite for one in sampled):
            return StepResult(plan.step, token_ids=tuple(one.token_id for one in sampled))
        return StepResult(plan.step, tuple(sampled))

    def close(self) -> None:
        self._plans.clear()


@dataclass
class Told:
    """What the engine said about one request."""

    events: list[Event] = field(default_factory=list)

    def tokens(self, choice: int = 0) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, Tokens) and event.choice == choice
            for token in event.token_ids
        ]

    @property
    def failed(self) -> Exception | None:
        return next((e.error for e in self.events if isinstance(e, RequestFailed)), None)

    @property
    def done(self) -> RequestDone | None:
        return next((e for e in self.events if isinstance(e, RequestDone)), None)

    @property
    def over(self) -> bool:
        return self.failed is not None or self.done is not None


class Simulation:
    """Engine, encoder and gateway in one thread; `lag` is how many steps an encoder takes."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        chunk_tokens: int = 16,
        max_running: int = 8,
        prefix: bool = True,
        depth: int = 1,
        ahead: bool = False,
        most_rows: int = 0,
        slab_pages: int = 16,
        page_rows: int = 4,
        segment_rows: int = 100,
        lag: int = 0,
        timeout_s: float = 120.0,
        ranks: SimulatedRanks | None = None,
        **limits: int,
    ) -> None:
        self.metrics = DecoderMetrics()
        self.ranks = ranks or SimulatedRanks(
            block_size=block_size, depth=depth, ahead=ahead, most_rows=most_rows
        )
        self.receiver = EmbeddingReceiver(pages=slab_pages, page_rows=page_rows, row_bytes=4)
        self.blocks = BlockPool(num_blocks)
        self.prefix = PrefixIndex(self.blocks) if prefix else None
        self.scheduler = Scheduler(
            Limits(
                max_running=max_running,
                chunk_tokens=chunk_tokens,
                block_size=block_size,
                depth=depth,
                ahead=ahead,
                most_rows=most_rows,
                **limits,
            ),
            pool=self.blocks,
            receiver=self.receiver,
            prefix=self.prefix,
            metrics=self.metrics,
        )
        self.mailbox = Mailbox(self._take)
        self.now = 0.0
        self.core = EngineCore(
            scheduler=self.scheduler,
            receiver=self.receiver,
            executor=self.ranks,
            mailbox=self.mailbox,
            metrics=self.metrics,
            embedding_timeout_s=timeout_s,
            clock=lambda: self.now,
        )
        self.told: dict[str, Told] = {}
        self.load, self.silent, self.num_lost = EngineLoad(), False, 0
        self._segment_rows, self._lag = segment_rows, lag
        self._late: deque[tuple[int, FetchEvent]] = deque()
        self._opened: dict[bytes, Open] = {}
        self._turn = 0

    def add(self, add: AddRequest) -> None:
        self.told[add.request_id] = Told()
        self.mailbox.put(add)

    def step(self) -> None:
        self._turn += 1
        self.now += 0.001
        while self._late and self._late[0][0] <= self._turn:
            self.mailbox.put(self._late.popleft()[1])
        self.core.step_safely()
        self.check()

    def check(self) -> None:
        self.scheduler.check()
        self.receiver.check()
        running = self.scheduler._running
        stalled_at = self.scheduler._seats.counts.stalled_at[running.seats]
        for sequence, revision in zip(running, stalled_at, strict=True):
            if revision == self.receiver.revision and not sequence.decodes:
                least = self.scheduler._limits.least_text
                left = landed_chunk(sequence, sequence.num_left, self.receiver, least_text=least)
                assert not left, "rows came for one that is passed by"

    def run(self, *, most: int = 3000) -> None:
        for _ in range(most):
            if all(told.over for told in self.told.values()):
                return
            self.step()
        waiting = [name for name, told in self.told.items() if not told.over]
        raise AssertionError(f"starved: {waiting}")

    def settle(self) -> None:
        """Lets transfers end, then asserts that nothing is left behind."""
        for _ in range(5 + 2 * self._lag):
            self.step()
        assert self.blocks.num_held == 0
        assert self.receiver.num_free_pages == self.receiver._pool.num_pages
        assert (self.load.running, self.load.waiting) == (0, 0)

    def _take(
        self,
        events: StepEvents,
        commands: Sequence[FetchCommand],
        load: EngineLoad,
    ) -> None:
        self.load = load
        for request_id, event in events:
            self.told[request_id].events.append(event)
            if isinstance(event, PartFailed) and event.cause is Cause.PREEMPTED:
                self.num_lost += 1
                again = (event.item, event.part, event.attempt + 1, SOURCE)
                self.mailbox.put(RedirectPart(request_id, *again))
        for command in commands:
            for back in self._answer(command):
                self._late.append((self._turn + self._lag, back))

    def _answer(self, command: FetchCommand) -> list[FetchEvent]:
        match command:
            case Open():
                self._opened[command.fetch_id] = command
                if self.silent:
                    return []
                edges = [*range(command.rows.begin, command.rows.end, self._segment_rows)]
                spans = zip(edges, [*edges[1:], command.rows.end], strict=True)
                return [
                    Ready(command.fetch_id, i, Span(a, b), ROWS) for i, (a, b) in enumerate(spans)
                ]
            case Grant():
                digest = self._opened[command.fetch_id].digest
                for place in command.destinations:
                    for i, row in enumerate(range(place.rows.begin, place.rows.end)):
                        self.ranks.slab[place.address // 4 + i] = (digest, row)
                return [Landed(command.fetch_id, command.segment, command.seq)]
            case Cancel():
                return [Quiesced(command.fetch_id)]
        raise AssertionError(command)
