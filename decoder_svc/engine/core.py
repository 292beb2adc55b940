"""The engine: reads like the life of a request, see `step`. Runs in a thread of its own.

Owns the requests. What runs when is the scheduler's decision, which rows are where the receiver's
business, computing the executor's. Only here is everything caught: a failing step fails its
requests, and ends the engine only if that leaves pages that nobody can account for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

from chiasm.errors import ChiasmError, EmbeddingLost, Internal, InvalidRequest, Unavailable
from chiasm.telemetry import DecoderMetrics
from chiasm.transport.base import RANK_BANK
from decoder_svc.embeddings.events import FetchCommand, ItemLanded, Notice, PartLost
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.mailbox import Item, Mailbox
from decoder_svc.engine.messages import (
    AbortRequest,
    AddRequest,
    ChoiceDone,
    FinishReason,
    ItemReleased,
    PartFailed,
    RedirectPart,
    RequestFailed,
    StepPlan,
    StepResult,
    StopChoice,
    Tokens,
)
from decoder_svc.engine.outgoing import Outgoing
from decoder_svc.engine.pipeline import Pipeline
from decoder_svc.engine.request import Request, Sequence, State
from decoder_svc.engine.transfers import TransferTimes
from decoder_svc.runner.executor import Executor, RanksLost
from decoder_svc.sampling.params import NO_TOKEN, Sampled
from decoder_svc.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_IDLE_S = 1.0  # longest sleep while there is no request
_STALLED_S = 0.1  # and while requests wait for rows or ranks: deadlines are looked at so often
_PATIENCE_S = 60.0  # for lost ranks to come back before their requests are failed
_MOST_CRASHES = 2  # losses of ranks that one request may have been in flight for


class EngineCore:
    """Takes requests from the mailbox through their lives.

    Args:
        scheduler: Decides what runs.
        receiver: Fetches rows of media.
        executor: Computes steps.
        mailbox: Brings commands and transfer events, takes events and transfer commands away.
        metrics: Counters and gauges.
        embedding_timeout_s: How long a request may wait for rows.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        receiver: EmbeddingReceiver,
        executor: Executor,
        mailbox: Mailbox,
        metrics: DecoderMetrics,
        embedding_timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._receiver = receiver
        self._executor = executor
        self._mailbox = mailbox
        self._metrics = metrics
        self._timeout_s = embedding_timeout_s
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._outgoing = Outgoing(mailbox)
        self._pipeline = Pipeline(executor, metrics, clock)
        self._lost_at: float | None = None  # when the ranks were lost, until they are back
        # Names whom to fail should the next line raise; None = unclear.
        self._suspects: Callable[[], Iterable[str]] | None = None
        self._transfers = TransferTimes()
        self._looks_at = 0.0  # for stalled requests, the next time
        self._num_seen = 0
        self._stopped = False
        self.heartbeat = clock()

    def run(self) -> None:
        """Steps until `stop`; sleeps on the mailbox while there is nothing to compute."""
        while not self._stopped:
            self.heartbeat = self._clock()
            if not self.step_safely():
                self._mailbox.wait(_STALLED_S if self._requests else _IDLE_S)

    @property
    def available(self) -> bool:
        """Whether there are ranks to compute on."""
        return self._executor.ready

    def stop(self) -> None:
        """Ends `run`; from any thread."""
        self._stopped = True
        self._mailbox.wake()

    def step(self) -> bool:
        """One turn. Returns whether anything was computed or is being computed."""
        self._take_in(self._mailbox.items())
        plan = self._plan()
        self._ask_for_rows()
        self._submit(plan)
        busy = len(self._pipeline) > 0
        self._apply(self._collect(plan))
        self._publish()
        return busy

    def step_safely(self) -> bool:
        """`step`, but what it raises fails the requests concerned. Raises as `_fail_suspects`."""
        try:
            return self.step()
        except RanksLost as loss:
            self._start_over(loss)
            return True
        except Exception:  # the step loop
            logger.exception("step failed")
            self._metrics.step_failures.inc()
            self._fail_suspects()
            return True

    # 1. Take in.

    def _take_in(self, items: Iterable[Item]) -> None:
        for item in items:
            request_id = getattr(item, "request_id", None)
            self._suspects = (lambda name=request_id: (name,)) if request_id else None
            match item:
                case AddRequest():
                    self._add(item)
                case AbortRequest():
                    if item.request_id in self._requests:
                        logger.info("request %s aborted", item.request_id)
                    self._end(item.request_id)
                case StopChoice():
                    self._stop_choice(item)
                case RedirectPart():
                    self._redirect(item)
                case _:
                    self._transfers.note(item, self._requests, self._clock())
                    self._receiver.on_event(item)
        self._suspects = None
        self._fail_stalled()

    def _add(self, add: AddRequest) -> None:
        self._num_seen += 1
        request = Request(add, self._num_seen, self._clock())
        self._requests[add.request_id] = request
        self._metrics.prompt_tokens.inc(len(add.prompt_ids))
        if add.promises:
            self._receiver.add(add.request_id, add.promises)
        self._scheduler.add(request)
        for sequence in request.sequences:
            if len(sequence.output) >= add.sampling.max_tokens:  # a replay of a finished choice
                self._finish(sequence, FinishReason.LENGTH)

    def _stop_choice(self, stop: StopChoice) -> None:
        request = self._requests.get(stop.request_id)
        if request is None or not 0 <= stop.choice < len(request.sequences):
            return
        sequence = request.sequences[stop.choice]
        if sequence.state is not State.FINISHED:
            self._finish(sequence, FinishReason.STOP)

    def _redirect(self, move: RedirectPart) -> None:
        request = self._requests.get(move.request_id)
        if request is None or move.item not in request.promises:
            return
        use = self._receiver.add_source if move.hedge else self._receiver.redirect
        if not use(move.request_id, move.item, move.part, move.attempt, move.source):
            self._metrics.stale_attempts.inc()

    def _fail_stalled(self) -> None:
        now = self._clock()
        if now < self._looks_at:
            return
        self._looks_at = now + _STALLED_S
        for request in tuple(self._requests.values()):
            since = request.clock.stalled_since
            if since is not None and now - since > self._timeout_s:
                self._metrics.embedding_lost.labels(cause="timeout").inc()
                message = f"embeddings did not arrive within {self._timeout_s:g} s (TIMEOUT)"
                self._fail(request.request_id, EmbeddingLost(message))

    # 2. Ask for rows that will be needed soon.

    def _ask_for_rows(self) -> None:
        self._receiver.grant(self._scheduler.demands())
        commands = self._receiver.take_commands()
        if commands:
            self._transfers.opened(commands)
            self._send(commands)  # before the step: the transfer runs while the model does

    # 3. Compute.

    def _plan(self) -> StepPlan | None:
        self._executor.poll()
        if not self._executor.ready:
            self._give_up_in_time()
            return None
        self._lost_at = None
        if self._pipeline.is_full:
            return None
        return self._scheduler.schedule(self._clock())

    def _submit(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self._suspects = partial(self._scheduler.members, plan.step)
            self._pipeline.submit(plan)

    def _collect(self, submitted: StepPlan | None) -> StepResult | None:
        """The oldest step's result, once the pipeline is full or there is nothing to add to it."""
        pipeline = self._pipeline
        if not len(pipeline) or (submitted is not None and not pipeline.is_full):
            return None
        self._suspects = partial(self._scheduler.members, pipeline.oldest)
        return pipeline.collect()

    # 4. Apply.

    def _apply(self, result: StepResult | None) -> None:
        if result is None:
            return
        flight = self._scheduler.complete(result.step)
        self._suspects = lambda: (sequence.request.request_id for sequence in flight.sequences)
        draws: tuple[tuple[Sequence, Sampled], ...] = ()
        if not result.token_ids:
            draws = tuple(zip(flight.drawing, result.sampled, strict=True))
            self._fail_unsound(draws)
        self._scheduler.share(flight)
        if result.token_ids:
            told, others = flight.take(result.token_ids)
            self._outgoing.say_tokens(told)
            for sequence, token_id in others:
                if sequence.state is State.RUNNING:
                    self._take_token(sequence, token_id)
        for sequence, sampled in draws:
            if sequence.state is State.RUNNING:
                self._take_draw(sequence, sampled)
        self._suspects = None

    def _fail_unsound(self, draws: Iterable[tuple[Sequence, Sampled]]) -> None:
        """Before others can find their pages: any of those may hold what is not a number."""
        for sequence, sampled in draws:
            request = sequence.request
            if not sampled.finite and sequence.state is State.RUNNING:
                self._metrics.nonfinite_logits.inc()
                logger.error("request %s: non-finite logits", request.request_id)
                self._scheduler.condemn(request)
                self._fail(request.request_id, Internal("the model produced non-finite numbers"))

    def _take_draw(self, sequence: Sequence, sampled: Sampled) -> None:
        if sampled.token_id == NO_TOKEN:
            message = "the grammar of the answer has become too complex to go on with"
            error = InvalidRequest(message, param="response_format")
            self._fail(sequence.request.request_id, error)
            return
        told = () if sampled.logprob is None else (sampled,)
        self._take_token(sequence, sampled.token_id, told)

    def _take_token(
        self, sequence: Sequence, token_id: int, told: tuple[Sampled, ...] = ()
    ) -> None:
        request = sequence.request
        if request.clock.first_token is None:
            request.clock.first_token = self._clock()
        position = len(sequence.output)
        reason = sequence.append(token_id)
        if reason is not FinishReason.STOP:
            self._outgoing.say(
                request.request_id, Tokens(sequence.choice, position, (token_id,), told)
            )
        if reason is not None:
            stop_id = token_id if reason is FinishReason.STOP else None
            self._finish(sequence, reason, stop_id)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_id: int | None = None) -> None:
        request = sequence.request
        self._scheduler.finish(sequence)
        self._outgoing.say(request.request_id, ChoiceDone(sequence.choice, reason, stop_id))
        if not request.live:
            summary = request.summary(self._clock())
            self._metrics.generation_tokens.inc(request.num_sampled)
            logger.info("request %s done: %s", request.request_id, summary)
            self._outgoing.say(request.request_id, summary)
            self._end(request.request_id)

    def _fail(self, request_id: str, error: ChiasmError) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            logger.warning("request %s failed: %s", request_id, error)
            self._outgoing.say(request.request_id, RequestFailed(error))
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        """Nothing of the request stays behind; unknown requests have ended already."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for sequence in reversed(request.live):  # who leads last: nobody has to follow
            self._scheduler.finish(sequence)
        if request.promises:
            self._receiver.release(request_id)

    def _fail_suspects(self) -> None:
        """Fails whom the exception concerns: the plan in hand, or everybody when unclear.

        Raises:
            AssertionError: The scheduler's books are wrong, so that one request might read another
                one's pages. The engine ends, and its process: other decoders take its requests.
        """
        named = set(self._suspects()) if self._suspects is not None else set()
        failed = named or set(self._requests)
        self._pipeline.abandon()  # after a lost result none can be told apart
        failed |= self._scheduler.discard()
        self._suspects = None
        error = Internal("internal error")
        for request_id in failed:
            if request_id not in self._requests:  # it could not even be taken in
                self._outgoing.say(request_id, RequestFailed(error))
            self._fail(request_id, error)
        self._publish()
        self._scheduler.check()

    # When the ranks are lost.

    def _start_over(self, loss: RanksLost) -> None:
        """All pages are gone, no request is: everybody computes again what it had.

        But whoever was in flight too often when ranks were lost may be what kills them.
        """
        steps = self._pipeline.abandon()
        flying = {name for step in steps for name in self._scheduler.members(step)}
        logger.error("%s; %d requests start over", loss, len(self._requests))
        self._suspects = None
        self._lost_at = self._clock()
        self._metrics.step_failures.inc()
        self._scheduler.restart()
        self._receiver.lose_bank(RANK_BANK)
        for request in tuple(self._requests.values()):
            request.num_crashes += request.request_id in flying
            if request.num_crashes > _MOST_CRASHES:
                self._fail(request.request_id, Internal("internal error"))
        self._publish()

    def _give_up_in_time(self) -> None:
        """Other decoders may serve the requests that this one cannot for so long."""
        if self._lost_at is not None and self._clock() - self._lost_at > _PATIENCE_S:
            for request_id in tuple(self._requests):
                self._fail(request_id, Unavailable("the decoder has lost its ranks"))

    # 5. Publish.

    def _publish(self) -> None:
        self._suspects = None
        for notice in self._receiver.take_notices():
            self._tell(notice)
        self._send(self._receiver.take_commands())

    def _tell(self, notice: Notice) -> None:
        request = self._requests.get(notice.request_id)
        if request is None:
            return
        match notice:
            case ItemLanded(_, item):
                end = request.promises[item].prompt_end
                self._outgoing.say(
                    request.request_id, ItemReleased(item, end <= (request.num_cached or 0))
                )
            case PartLost(_, item, part, attempt, cause, message):
                self._metrics.embedding_lost.labels(cause=cause.value).inc()
                self._outgoing.say(
                    request.request_id, PartFailed(item, part, attempt, cause, message)
                )

    def _send(self, commands: Seq[FetchCommand]) -> None:
        load = replace(
            self._scheduler.load(),
            slab_pages_free=self._receiver.num_free_pages,
            requests_seen=self._num_seen,
            available=self._executor.ready,
            num_losses=self._executor.num_losses,
        )
        self._outgoing.send(commands, load)
