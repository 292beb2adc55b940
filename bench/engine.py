"""A decoder's engine in this process, as the service runs it but without rpcs, for measuring."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from chiasm.config.decoder import DecoderConfig
from chiasm.telemetry import DecoderMetrics
from decoder_svc.assembly import build_engine, load_parts, warm_up
from decoder_svc.config import read_text_config
from decoder_svc.embeddings.events import FetchCommand
from decoder_svc.engine.mailbox import Mailbox
from decoder_svc.engine.messages import (
    AddRequest,
    EngineLoad,
    RequestDone,
    RequestFailed,
    StepEvents,
    Tokens,
)
from decoder_svc.runner.ranks import RanksExecutor
from decoder_svc.sampling.params import SamplingParams


@dataclass(slots=True)
class Answer:
    """What came back for a request, and when (seconds, monotonic)."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[tuple[int, ...]] = field(default_factory=list)
    top_logprobs: list[tuple[float, ...]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent_at


class BenchEngine:
    """Starts the engine; requests are put in and waited for by any thread.

    Args:
        config: Of the decoder.
        model_dir: A checkpoint, or a directory that looks like one.
    """

    def __init__(self, config: DecoderConfig, model_dir: Path) -> None:
        started = time.monotonic()
        self.text = read_text_config(model_dir)
        self.parts = load_parts(config, self.text, model_dir)
        warm_up(
            self.parts.executor,
            num_blocks=self.parts.num_blocks,
            block_size=config.memory.block_size,
        )
        self.start_s = time.monotonic() - started
        self.kv_tokens = self.parts.num_blocks * config.memory.block_size
        self._answers: dict[str, Answer] = {}
        self._names = map(str, itertools.count())
        self._mailbox = Mailbox(self._take)
        self.core = build_engine(config, self.parts, self._mailbox, DecoderMetrics())
        self._thread = threading.Thread(target=self.core.run, name="engine", daemon=True)
        self._thread.start()

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Processes of ranks; none where the only one runs in this process."""
        executor = self.parts.executor
        return executor.pids if isinstance(executor, RanksExecutor) else ()

    def ask(self, prompt: Sequence[int], max_tokens: int, **sampling: object) -> Answer:
        """Sends a request that ends after `max_tokens` tokens."""
        name = next(self._names)
        answer = self._answers[name] = Answer(time.monotonic())
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        self._mailbox.put(AddRequest(request_id=name, prompt_ids=tuple(prompt), sampling=params))
        return answer

    def wave(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, list[Answer]]:
        """All at once. Returns the seconds until all are done, and the answers."""
        started = time.monotonic()
        answers = [self.ask(prompt, max_tokens) for prompt in prompts]
        for answer in answers:
            finish(answer)
        return time.monotonic() - started, answers

    def close(self) -> None:
        """Ends the engine and its ranks."""
        self.core.stop()
        self._thread.join(10)
        self.parts.executor.close()
        self.parts.slab.close()

    def _take(
        self,
        events: StepEvents,
        commands: Sequence[FetchCommand],
        load: EngineLoad,
    ) -> None:
        assert not commands, "requests of text alone fetch nothing"
        now = time.monotonic()
        for name, event in events:
            answer = self._answers[name]
            match event:
                case Tokens():
                    answer.token_times += [now] * len(event.token_ids)
                    answer.token_ids += event.token_ids
                    for sampled in event.sampled:
                        answer.logprobs.append(sampled.logprob or 0.0)
                        answer.top_ids.append(sampled.top_ids)
                        answer.top_logprobs.append(sampled.top_logprobs)
                case RequestDone() | RequestFailed():
                    del self._answers[name]
                    answer.error = event.error if isinstance(event, RequestFailed) else None
                    answer.done.set()


def finish(answer: Answer) -> Answer:
    """Waits for the answer. Raises what it failed with."""
    if not answer.done.wait(300):
        raise TimeoutError("no answer within 300 s")
    if answer.error is not None:
        raise answer.error
    return answer


def random_prompts(
    count: int, length: int, *, vocabulary: int, rng: np.random.Generator
) -> list[list[int]]:
    """Prompts of text that share no beginning."""
    return rng.integers(1000, vocabulary - 2000, (count, length)).tolist()  # type: ignore[no-any-return]
