"""What a step of decoding costs the engine's thread, with ranks that answer at once.

    python -m bench.step_cpu [--sequences 256] [--waiting 32] [--profile]

Scheduling, the plan, taking the result in and telling of tokens; what ranks compute is left out.
One line each for: greedy requests; with the frames that ranks of their own would be sent; requests
with a temperature; and answers that end and are followed by others, prompts included. Those that
wait have a picture whose rows never come: they should cost next to nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import logging
import pstats
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence

from chiasm.plan import Grid, MediaPlan, Modality, Part, Promise, Source, Span
from chiasm.telemetry import DecoderMetrics
from decoder_svc.embeddings.events import FetchCommand
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.core import EngineCore
from decoder_svc.engine.mailbox import Mailbox
from decoder_svc.engine.messages import (
    AddRequest,
    EngineLoad,
    RequestDone,
    StepEvents,
    StepPlan,
    StepResult,
)
from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.prefix import PrefixIndex
from decoder_svc.runner.codec import decode, encode
from decoder_svc.runner.executor import Executor
from decoder_svc.runner.rows import drawing_seats
from decoder_svc.sampling.params import SamplingParams
from decoder_svc.scheduler.budget import Limits
from decoder_svc.scheduler.scheduler import Scheduler

_PROMPT, _ANSWER, _TOKEN = 128, 4000, 7
_SHORT_ANSWER = 200  # on average, where answers end
_BLOCK = 16
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
        frames: Whether plans and results are packed as for processes.
    """

    depth = 2

    def __init__(self, most_rows: int, *, frames: bool = False) -> None:
        self.most_rows = most_rows
        self.seconds = 0.0
        self._frames = frames
        self._results: deque[StepResult | bytes] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See the base class."""
        if self._frames:
            encode(plan)
        begin = time.thread_time()
        result = StepResult(plan.step, token_ids=(_TOKEN,) * len(drawing_seats(plan)))
        self._results.append(encode(result) if self._frames else result)
        self.seconds += time.thread_time() - begin

    def collect(self) -> StepResult:
        """See the base class."""
        result = self._results.popleft()
        if isinstance(result, bytes):
            result = decode(result)  # type: ignore[assignment]
        assert isinstance(result, StepResult), "results come up"
        return result

    def close(self) -> None:
        """See the base class."""


class Bench:
    """An engine in which so many sequences decode.

    Args:
        sequences: How many.
        waiting: How many more wait for rows.
        frames: See `NoRanks`.
        temperature: Of every request.
        ends: Whether answers end; for each, another request comes.
    """

    def __init__(
        self,
        sequences: int,
        *,
        waiting: int = 0,
        frames: bool = False,
        temperature: float = 0.0,
        ends: bool = False,
    ) -> None:
        metrics = DecoderMetrics()
        pool = BlockPool((sequences + waiting) * (_PROMPT + _ANSWER + _BLOCK) // _BLOCK)
        receiver = EmbeddingReceiver(pages=64, page_rows=64, row_bytes=64)
        self.ranks, self._mailbox = NoRanks(sequences, frames=frames), Mailbox(self._hear)
        limits = Limits(
            max_running=sequences + waiting,
            chunk_tokens=8192,
            block_size=_BLOCK,
            ahead=True,
            most_rows=sequences,
            mixed_tokens=1536,
            prefill_delay=4,
        )
        scheduler = Scheduler(
            limits, pool=pool, receiver=receiver, prefix=PrefixIndex(pool), metrics=metrics
        )
        self.core = EngineCore(
            scheduler=scheduler,
            receiver=receiver,
            executor=self.ranks,
            mailbox=self._mailbox,
            metrics=metrics,
        )
        self._ends, self._temperature = ends, temperature
        self._names = itertools.count()
        self._random = random.Random(0)
        for _ in range(waiting):
            self._ask((_PROMISE,))
        for _ in range(sequences + 64 * ends):  # some wait, so that all seats are taken
            self._ask()
        for _ in range(2 * _SHORT_ANSWER if ends else 40):
            self.core.step()

    def measure(self, steps: int) -> list[float]:
        """Microseconds of the thread's CPU for each step, ranks left out."""
        spent = []
        for _ in range(steps):
            begin, apart = time.thread_time(), self.ranks.seconds
            self.core.step()
            spent.append((time.thread_time() - begin - (self.ranks.seconds - apart)) * 1e6)
        return spent

    def _ask(self, promises: tuple[Promise, ...] = ()) -> None:
        index = next(self._names)
        # Of different lengths: about as many sequences need a new page in every step.
        prompt = tuple(range(index, index + _PROMPT + index % _BLOCK))
        most = self._random.randint(1, 2 * _SHORT_ANSWER) if self._ends else _ANSWER
        params = SamplingParams(max_tokens=most, temperature=self._temperature, stop_token_ids=(2,))
        add = AddRequest(
            request_id=str(index), prompt_ids=prompt, sampling=params, promises=promises
        )
        self._mailbox.put(add)

    def _hear(self, events: StepEvents, commands: Sequence[FetchCommand], load: EngineLoad) -> None:
        for _, event in events.others:
            if isinstance(event, RequestDone):
                self._ask()


def main() -> None:
    """Prints microseconds of CPU a step, and with --profile where they go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0, help="sequences that wait for rows")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"{args.sequences} sequences, us of CPU a step: mean, median, least tenth")
    for name, settings in (
        ("greedy", {}),
        ("greedy, frames", {"frames": True}),
        ("temperature", {"temperature": 0.7}),
        ("answers end", {"ends": True}),
    ):
        bench = Bench(args.sequences, waiting=args.waiting, **settings)  # type: ignore[arg-type]
        spent = sorted(bench.measure(args.steps))
        mean, median = statistics.mean(spent), statistics.median(spent)
        print(f"{name:16} {mean:6.0f} {median:6.0f} {spent[len(spent) // 10]:6.0f}")
        if args.profile:
            with cProfile.Profile() as profile:
                for _ in range(args.steps):
                    bench.core.step()
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
