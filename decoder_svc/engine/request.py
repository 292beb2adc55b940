"""A request and its choices while they live in the engine. Mutable; owned by the engine's thread.

A choice's tokens are the prompt and its output. The first `computed` have K and V in pages; what is
counted of it is in `Counts`, its own or, while it has a seat, the batch's.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from chiasm.plan import Promise
from decoder_svc.embeddings.events import Demand
from decoder_svc.engine.counts import Counts
from decoder_svc.engine.messages import PENDING, AddRequest, FinishReason, RequestDone
from decoder_svc.kv_cache.prefix import MediaSpan, root_key
from decoder_svc.sampling.params import Draw

# How many earlier arrivals a unit of priority overtakes. Finite, so that whoever waits is served,
# however many urgent requests keep coming.
PRIORITY_STEP = 256


def serving_order(priority: int, arrival: int, choice: int) -> tuple[int, int, int]:
    """Sort key: who is served first. Priority counts as having arrived earlier."""
    return (arrival - priority * PRIORITY_STEP, -priority, choice)


class State(StrEnum):
    """Where a choice is."""

    PARKED = "parked"
    """Waits for a sibling to prefill the prompt they share."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One choice of a request."""

    def __init__(self, request: Request, choice: int, output: tuple[int, ...]) -> None:
        self.request = request
        self.choice = choice
        self.output = list(output)
        self.state = State.PARKED
        self.blocks: list[int] = []
        self.block_keys: list[bytes] = []
        """Keys of the full pages, as far as they were needed; they depend on tokens alone."""
        self.num_published = 0
        """Pages the prefix index has been told of."""
        self.seat: int | None = None
        """Where ranks keep its state, while it is in the batch or in flight."""
        self.demands: tuple[int, list[Demand]] = (-1, [])
        """Rows that it wants soon, and `num_scheduled` when they were counted."""
        self.order = serving_order(request.priority, request.arrival, choice)
        self._counts, self._at = Counts(1), 0
        counts, sampling = self._counts, request.sampling
        counts.prompt[0] = request.num_prompt
        counts.most[0] = request.num_prompt + sampling.max_tokens
        counts.delta[0] = request.position_delta
        counts.choice[0] = choice
        counts.is_plain[0] = request.is_plain
        counts.needs_host[0] = request.needs_host_state
        counts.has_siblings[0] = request.num_choices > 1
        counts.tokens[0] = request.num_prompt + len(output)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return int(self._counts.tokens[self._at])

    @property
    def num_scheduled(self) -> int:
        """Tokens with K and V in pages once the steps in flight are done."""
        return int(self._counts.scheduled[self._at])

    @property
    def in_flight(self) -> int:
        """Tokens of steps that have been submitted and not come back."""
        return int(self._counts.in_flight[self._at])

    @property
    def computed(self) -> int:
        """Tokens with K and V in pages."""
        return self.num_scheduled - self.in_flight

    @property
    def num_drawing(self) -> int:
        """Tokens that steps in flight draw: known to come, but not what they are."""
        return int(self._counts.drawing[self._at])

    @property
    def last_step(self) -> int:
        """The last step it was part of."""
        return int(self._counts.last_step[self._at])

    @property
    def num_told(self) -> int:
        """Pages that ranks have been told of."""
        return int(self._counts.told[self._at])

    @property
    def num_left(self) -> int:
        """Tokens to schedule before the next one can be sampled."""
        return self.num_tokens + self.num_drawing - self.num_scheduled

    @property
    def decodes(self) -> bool:
        """Whether all there is to schedule is the token sampled last."""
        return self.num_left == 1 and self.num_scheduled >= self.request.num_prompt

    def finish(self) -> None:
        """No more tokens of it are wanted."""
        self.state = State.FINISHED
        self.request.move()
        self._counts.is_over[self._at] = True

    def sit(self, seat: int, counts: Counts) -> None:
        """Joins the batch, whose counts these are."""
        counts.copy(seat, self._counts, self._at)
        self._counts, self._at, self.seat = counts, seat, seat

    def leave(self) -> None:
        """Leaves it, and takes its counts along."""
        counts = Counts(1)
        counts.copy(0, self._counts, self._at)
        self._counts, self._at, self.seat = counts, 0, None

    def attach(self, blocks: list[int], num_tokens: int) -> None:
        """Has pages that hold so many of its tokens, and nothing else."""
        self.blocks = blocks
        self.num_published = len(blocks)
        counts, at = self._counts, self._at
        counts.pages[at] = len(blocks)
        counts.told[at] = counts.stalled_at[at] = 0
        counts.scheduled[at] = num_tokens

    def extend(self, blocks: list[int]) -> None:
        """Gets more pages, at least one."""
        self.blocks += blocks
        self._counts.pages[self._at] = len(self.blocks)
        self._counts.newest_page[self._at] = blocks[-1]

    def tell(self) -> tuple[int, ...]:
        """The pages that ranks have not been told of; they are now."""
        told = self.num_told
        self._counts.told[self._at] = len(self.blocks)
        return tuple(self.blocks[told:])

    def tokens(self, begin: int, end: int) -> tuple[int, ...]:
        """Token ids [begin, end) of prompt and output; PENDING for the one that is being drawn."""
        prompt = self.request.prompt
        edge = len(prompt)
        if begin == self.num_tokens:
            return (PENDING,)
        if begin >= edge:
            return tuple(self.output[begin - edge : end - edge])
        return prompt[begin:end] + tuple(self.output[: max(0, end - edge)])

    def draw(self) -> Draw:
        """The next draw."""
        params = self.request.sampling
        position = len(self.output) + self.num_drawing
        if not params.needs_host_state:
            return Draw(params, self.choice, position)
        if not params.needs_history:
            return Draw(params, self.choice, position, (), tuple(self.output))
        return Draw(params, self.choice, position, self.request.prompt, tuple(self.output))

    def stall(self, revision: int, now: float) -> None:
        """Its next row is missing, and will be until the receiver is at another revision."""
        self._counts.stalled_at[self._at] = revision
        clock = self.request.clock
        clock.stalled_since = now if clock.stalled_since is None else clock.stalled_since

    def look_again(self) -> None:
        """Whether its next row is missing is not known."""
        self._counts.stalled_at[self._at] = 0

    def choose(self, step: int) -> None:
        """It is part of the step that is being put together."""
        self._counts.last_step[self._at] = step

    def begin(self, length: int, draws: bool) -> None:
        """So many tokens more are in flight, and with `draws` one that follows them."""
        counts, at = self._counts, self._at
        counts.scheduled[at] += length
        counts.in_flight[at] += length
        counts.drawing[at] += draws

    def end(self, length: int, draws: bool, *, counts: bool) -> None:
        """So many tokens are back; with `counts` their K and V are in pages."""
        mine, at = self._counts, self._at
        mine.in_flight[at] -= length
        mine.drawing[at] -= draws
        if not counts:
            mine.scheduled[at] -= length

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a sampled token in; a stop token ends the choice and is not part of its output."""
        params = self.request.sampling
        if token_id in params.stop_token_ids:
            self.request.num_stopped += 1
            return FinishReason.STOP
        self.output.append(token_id)
        self._counts.tokens[self._at] += 1
        self._counts.is_heard[self._at] = True
        return FinishReason.LENGTH if len(self.output) >= params.max_tokens else None

    def check(self) -> None:
        """Raises AssertionError when a count is not of what it counts."""
        counts, at = self._counts, self._at
        assert counts.tokens[at] == self.request.num_prompt + len(self.output), "tokens miscounted"
        assert counts.pages[at] == len(self.blocks), "pages miscounted"
        assert counts.is_over[at] == (self.state is State.FINISHED), "an end was not counted"
        is_timed = self.request.clock.stalled_since is not None
        assert is_timed or not counts.stalled_at[at], "waits for rows without an end"


class Request:
    """What the choices share: the prompt, its media and positions, and the clock."""

    def __init__(self, add: AddRequest, arrival: int, now: float) -> None:
        self.request_id = add.request_id
        self.prompt = add.prompt_ids
        self.num_prompt = len(add.prompt_ids)
        self.sampling = add.sampling
        self.is_plain = add.sampling.is_plain
        """Whether every token of it is simply the likeliest."""
        self.needs_host_state = add.sampling.needs_host_state
        """Whether a token cannot be drawn before the one before it is known here."""
        self.priority = add.priority
        self.arrival = arrival
        self.promises: dict[int, Promise] = {p.item: p for p in add.promises}
        self.media = tuple(
            MediaSpan(p.prompt_offset, p.prompt_end, p.plan.digest) for p in add.promises
        )
        self.root_key = root_key(add.cache_salt, add.adapter_id)
        self.consumed = dict.fromkeys(self.promises, 0)
        """Per item, the rows that the receiver was told are no longer needed."""
        self.num_cached: int | None = None
        self.num_stopped = 0
        """Choices that have drawn a stop token."""
        self.num_crashes = 0
        """How often ranks were lost while they computed for this request."""
        self.clock = Clock(now)
        self._positions = np.frombuffer(add.grid_positions, dtype=np.int32).reshape(3, -1)
        self.position_delta = add.position_delta
        """Added to a token's index beyond the prompt to get its position."""
        resume = add.resume or ((),) * add.sampling.n
        self.num_choices = len(resume)
        self.sequences = [Sequence(self, index, output) for index, output in enumerate(resume)]

    @property
    def live(self) -> list[Sequence]:
        """Choices that have not finished."""
        return [s for s in self.sequences if s.state is not State.FINISHED]

    @property
    def num_parked(self) -> int:
        """Choices that wait for a sibling."""
        return sum(s.state is State.PARKED for s in self.sequences)

    @property
    def num_sampled(self) -> int:
        """Tokens drawn so far, in earlier lives too; stop tokens count."""
        return sum(len(s.output) for s in self.sequences) + self.num_stopped

    def summary(self, now: float) -> RequestDone:
        """What it took until now."""
        queue, transfer, prefill, decode = self.clock.phases_ms(now)
        return RequestDone(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached or 0,
            completion_tokens=self.num_sampled,
            queue_ms=queue,
            transfer_ms=transfer,
            prefill_ms=prefill,
            decode_ms=decode,
        )

    def move(self) -> None:
        """A choice is not kept from running by a missing row, or not any more.

        If another one is, its time begins anew, once it has been looked at again.
        """
        if self.clock.stalled_since is not None:
            self.clock.stalled_since = None
            for sequence in self.sequences:
                sequence.look_again()

    def position(self, index: int) -> int:
        """The position of a token of text at this index."""
        return index if index < len(self.prompt) else index + self.position_delta

    def grid_positions(self, begin: int, end: int) -> bytes:
        """int32 [3, end - begin] when the range touches a prompt with media, else empty."""
        edge = len(self.prompt)
        if begin >= edge or not self._positions.size:
            return b""
        chunk = np.empty((3, end - begin), dtype=np.int32)
        inside = min(end, edge) - begin
        chunk[:, :inside] = self._positions[:, begin : begin + inside]
        chunk[:, inside:] = np.arange(begin + inside, end, dtype=np.int32) + self.position_delta
        return chunk.tobytes()


class Clock:
    """When a request's phases began, in seconds; None = not yet."""

    def __init__(self, now: float) -> None:
        self.arrived = now
        self.scheduled: float | None = None
        self.first_ready: float | None = None
        self.last_landed: float | None = None
        self.first_token: float | None = None
        self.stalled_since: float | None = None
        """Set while the request could run but for rows that have not landed."""

    def phases_ms(self, now: float) -> tuple[float, float, float, float]:
        """Queue, transfer, prefill and decode, in ms."""
        scheduled = self.scheduled if self.scheduled is not None else now
        first_token = self.first_token if self.first_token is not None else now
        transfer = 0.0
        if self.first_ready is not None and self.last_landed is not None:
            transfer = self.last_landed - self.first_ready
        return (
            (scheduled - self.arrived) * 1e3,
            transfer * 1e3,
            (first_token - scheduled) * 1e3,
            (now - first_token) * 1e3,
        )
