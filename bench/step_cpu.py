"""What a step of decoding costs the engine's thread, with ranks that answer at once.

    python -m bench.step_cpu [--sequences 256] [--waiting 32] [--profile]

Scheduling, the plan, taking the result in and telling of tokens; what ranks compute is left out.
Those that wait have a picture whose rows never come: they should cost next to nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import pstats
import time
from collections import deque
from collections.abc import Sequence

from chiasm.plan import Grid, MediaPlan, Modality, Part, Promise, Source, Span
from chiasm.telemetry import DecoderMetrics
from decoder_svc.embeddings.events import FetchCommand
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.core import EngineCore
from decoder_svc.engine.mailbox import Mailbox
from decoder_svc.engine.messages import AddRequest, EngineLoad, StepEvents, StepPlan, StepResult
from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.prefix import PrefixIndex
from decoder_svc.runner.executor import Executor
from decoder_svc.runner.rows import drawing_seats
from decoder_svc.sampling.params import SamplingParams
from decoder_svc.scheduler.budget import Limits
from decoder_svc.scheduler.scheduler import Scheduler

_PROMPT, _ANSWER, _TOKEN = 128, 4000, 7
_PLAN = MediaPlan(
    digest=bytes(32),
    family="qwen2_5_vl",
    modality=Modality.IMAGE,
    source_height=224,
    source_width=224,
    resized_height=224,
    resized_width=224,
    grids=(Grid(1, 16, 16),),
    num_rows=64,
    media_bytes=1,
    media_type="image/png",
)
_PROMISE = Promise(0, _PLAN, 20, (Part(0, Span(0, 64), Source(bytes(16), "nobody:1", 1)),))


class NoRanks(Executor):
    """Draws the same token for everybody; its own time is kept apart.

    Args:
        most_rows: Sequences of a step that are told in columns.
    """

    depth = 2

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.seconds = 0.0
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See the base class."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """See the base class."""
        begin = time.process_time()
        plan = self._plans.popleft()
        result = StepResult(plan.step, token_ids=(_TOKEN,) * len(drawing_seats(plan)))
        self.seconds += time.process_time() - begin
        return result

    def close(self) -> None:
        """See the base class."""


def _ignore(events: StepEvents, commands: Sequence[FetchCommand], load: EngineLoad) -> None:
    del events, commands, load


def engine_of(sequences: int, waiting: int) -> tuple[EngineCore, NoRanks]:
    """An engine in which so many sequences have been prefilled, and so many wait for rows."""
    metrics, everybody = DecoderMetrics(), sequences + waiting
    pool = BlockPool(everybody * (_PROMPT + _ANSWER + 16) // 16)
    receiver = EmbeddingReceiver(pages=64, page_rows=64, row_bytes=64)
    ranks, mailbox = NoRanks(sequences), Mailbox(_ignore)
    limits = Limits(
        max_running=everybody,
        chunk_tokens=8192,
        block_size=16,
        ahead=True,
        most_rows=sequences,
    )
    scheduler = Scheduler(
        limits, pool=pool, receiver=receiver, prefix=PrefixIndex(pool), metrics=metrics
    )
    core = EngineCore(
        scheduler=scheduler, receiver=receiver, executor=ranks, mailbox=mailbox, metrics=metrics
    )
    params = SamplingParams(max_tokens=_ANSWER, temperature=0.0)
    for index in range(everybody):
        # Of different lengths: the same number of sequences needs a new page in every step.
        prompt = tuple(range(index, index + _PROMPT + index % 16))
        promises = (_PROMISE,) if index >= sequences else ()
        mailbox.put(
            AddRequest(request_id=str(index), prompt_ids=prompt, sampling=params, promises=promises)
        )
    for _ in range(40):
        core.step()
    return core, ranks


def main() -> None:
    """Prints microseconds of CPU a step, and with --profile where they go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0, help="sequences that wait for rows")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    core, ranks = engine_of(args.sequences, args.waiting)
    begin, apart = time.process_time(), ranks.seconds
    for _ in range(args.steps):
        core.step()
    spent = time.process_time() - begin - (ranks.seconds - apart)
    beside = f" beside {args.waiting} that wait" if args.waiting else ""
    print(f"{args.sequences} sequences{beside}: {spent / args.steps * 1e6:.0f} us of CPU a step")
    if args.profile:
        with cProfile.Profile() as profile:
            for _ in range(args.steps):
                core.step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
