"""The life of a request. READ THIS FIRST.

    admit -> fetch -> plan -> prompt -> encode || generate -> detokenize

A face (REST or gRPC) hands in a job and writes out the events; everything between is decided here.
Errors before the first event are raised from the first `anext`: the face has sent no status yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from chiasm.config import GatewayConfig
from chiasm.errors import InvalidRequest, ModelNotFound, ResourceExhausted, TooLarge, Unavailable
from gateway.admission import Admission
from gateway.answer_reader import AnswerReader
from gateway.choices import Choices
from gateway.detokenizer import Detokenizer, Manner
from gateway.discovery import Fleet
from gateway.guides import grammar_of
from gateway.media import Intake, Medium
from gateway.messages import (
    ChatJob,
    Delta,
    Event,
    Job,
    MediaOptions,
    MediaPart,
    RawJob,
    Readiness,
    ServedModel,
    TextPart,
)
from gateway.order import Item, Order, context_of, sampling_of
from gateway.outlet import Outlet
from gateway.patience import PATIENCE_S, soon
from gateway.planning import Keys, Layout, Planner, seal
from gateway.prompt import ExpandedPrompt, PromptBuilder
from gateway.relay import Relay
from gateway.routing import Endpoint, prefix_key
from gateway.timeline import Timeline
from gateway.turns import TurnForm

_SHORT_TURNS, _SHORT_CHARS = 4, 1024  # rendered on the loop: see `_is_short`


class Pipeline:
    """Serves one checkpoint. Owns nothing that outlives a request but its collaborators.

    Args:
        config: The gateway's settings.
        fleet: Encoders and decoders; started and closed by the owner.
        intake: Fetches media and reads their headers.
        planner: The model family's.
        prompts: Chat template and tokenizer.
        processor: The processor digest that goes into every media digest.
        admission: How much is taken in.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        fleet: Fleet,
        intake: Intake,
        planner: Planner,
        prompts: PromptBuilder,
        processor: bytes,
        admission: Admission,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._intake = intake
        self._planner = planner
        self._prompts = prompts
        self._processor = processor
        self._relay = Relay(fleet, admission.metrics, hedge_after_s=config.routing.hedge_after_s)
        self._names = config.served_model_name or (_name(config.model),)
        self._created = int(time.time())
        self.admission = admission

    async def run(self, job: Job, outlet: Outlet | None = None) -> AsyncGenerator[Event, None]:
        """Everything that happens to a request, in order; what leaves by `outlet` not yielded."""
        outlet = outlet or Outlet()
        timeline = Timeline(self._timeout_s(job))
        parts = self._check(job)
        async with self.admission.ticket(job.tenant, timeline, media=bool(parts)) as ticket:
            async with timeline.enforced():
                with timeline.span("fetch"):
                    data = await self._intake.fetch(parts, ticket.reserve)
                with timeline.span("plan"):
                    media = await self._intake.read(parts, data)
                    layouts = self._plan(job, media)
                    prompt = await self._build_prompt(job, layouts)
                decoder = await self._pick_decoder(job, prompt, media)
                order = await self._make_order(job, prompt, decoder, media, layouts)
            made = 0  # tokens
            answered = False
            while not answered:
                async with timeline.enforced():
                    await ticket.decode(order.decode_bytes, encoders=self._fleet.num_encoders)
                flown = self._relay.fly(
                    order,
                    decoder=decoder,
                    choices=lambda: self._make_choices(job, prompt),
                    timeline=timeline,
                    outlet=outlet,
                )
                try:
                    async with aclosing(flown) as events:
                        async for event in events:
                            if not answered:
                                answered = True
                                ticket.decoded()  # every item is, before the first event
                            made += len(event.token_ids) if isinstance(event, Delta) else 0
                            yield event
                except ResourceExhausted as full:
                    if answered:
                        raise
                    async with timeline.enforced():
                        await ticket.again(full)
                    decoder = self._as_good_as(decoder, order)
                finally:
                    self.admission.tenants.spend(job.tenant, made + outlet.tokens)

    def _as_good_as(self, decoder: Endpoint, order: Order) -> Endpoint:
        """The idlest of those that could take the request as well."""
        size = len(order.token_ids)
        return self._fleet.decoders.pick(b"", tokens=size, like=decoder) or decoder

    def models(self) -> list[ServedModel]:
        """Every name a request may use."""
        length = self._fleet.decoders.max_model_len
        return [ServedModel(name, self._created, length) for name in self._names]

    def readiness(self) -> Readiness:
        """What can be served now."""
        return self._fleet.readiness()

    def _timeout_s(self, job: Job) -> float:
        ours = self._config.admission.request_timeout_s
        return ours if job.timeout_s is None else min(ours, job.timeout_s)

    def _check(self, job: Job) -> list[MediaPart]:
        """What can be refused without any work; returns the media in prompt order."""
        if job.model not in self._names:
            raise ModelNotFound(f"the model {job.model!r} is not served here", param="model")
        if isinstance(job, RawJob):
            return []
        parts = [
            part
            for message in job.messages
            for part in message.parts
            if isinstance(part, MediaPart)
        ]
        self._intake.check_counts(parts)
        return parts

    def _plan(self, job: Job, media: Sequence[Medium]) -> list[Layout]:
        """Sizes, frames and rows of every medium, and the budget of them all together."""
        if not isinstance(job, ChatJob):
            return []
        layouts = [
            self._planner.plan(
                medium.header, _wishes(medium.part, job.media_options), param=medium.part.param
            )
            for medium in media
        ]
        most = self._config.media.max_request_pixels
        if sum(layout.pixels for layout in layouts) > most:
            raise TooLarge(
                f"the media of this request come to more than {most} pixels after resizing; "
                "send fewer or set a lower mm_processor_kwargs.max_pixels",
                param="messages",
            )
        return layouts

    async def _build_prompt(self, job: Job, layouts: Sequence[Layout]) -> ExpandedPrompt:
        """Token ids with one run of placeholders per medium."""
        if isinstance(job, ChatJob):
            render = partial(
                self._prompts.render,
                job.messages,
                scripts=[layout.script for layout in layouts],
                form=TurnForm.of(job),
                limit=self._fleet.decoders.max_model_len,
            )
            rendered = render() if _is_short(job) else await asyncio.to_thread(render)
            return self._prompts.expand(rendered, [r for layout in layouts for r in layout.runs])
        if isinstance(job.prompt, str):
            ids = await asyncio.to_thread(
                self._prompts.encode_text, job.prompt, limit=self._fleet.decoders.max_model_len
            )
        else:
            self._prompts.check_ids(job.prompt, param="prompt")
            ids = job.prompt
        return ExpandedPrompt(ids)

    async def _pick_decoder(
        self, job: Job, prompt: ExpandedPrompt, media: Sequence[Medium]
    ) -> Endpoint:
        """The decoder to ask: where this prompt's prefix may be cached, if it is not too busy."""
        contents = [medium.sha256 for medium in media]
        located = list(zip(prompt.offsets, contents, strict=True))
        key = prefix_key(job.tenant_salt, prompt.token_ids, located)
        size = len(prompt.token_ids)
        return await soon(
            lambda: self._fleet.decoders.pick(key, tokens=size), otherwise=_missing("decoder")
        )

    async def _make_order(
        self,
        job: Job,
        prompt: ExpandedPrompt,
        decoder: Endpoint,
        media: Sequence[Medium],
        layouts: Sequence[Layout],
    ) -> Order:
        """Refuses what does not fit the context, before any encoder is called."""
        room = decoder.max_model_len - len(prompt.token_ids)
        param = "messages" if isinstance(job, ChatJob) else "prompt"
        self.admission.tenants.spend_prompt(job.tenant, len(prompt.token_ids))
        if not prompt.token_ids:
            raise InvalidRequest("the prompt is empty", param=param)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(prompt.token_ids)} tokens, media included; the model takes "
                f"{decoder.max_model_len} with at least one for the answer",
                param=param,
            )
        return Order(
            context=context_of(job),
            token_ids=prompt.token_ids,
            items=await self._seal_items(job, prompt, decoder, media, layouts),
            decode_bytes=sum(medium.header.decode_bytes for medium in media),
            sampling=sampling_of(
                job.sampling, room=room, grammar=grammar_of(job, self._prompts.dialect, prompt)
            ),
        )

    async def _seal_items(
        self,
        job: Job,
        prompt: ExpandedPrompt,
        decoder: Endpoint,
        media: Sequence[Medium],
        layouts: Sequence[Layout],
    ) -> tuple[Item, ...]:
        """Every medium in its place, its plan with the digest that names its rows."""
        if not media:
            return ()
        tower = await soon(
            lambda: self._fleet.encoders.tower_for(decoder), otherwise=_missing("encoder")
        )
        keys = Keys(tower=tower, processor=self._processor, salt=job.tenant_salt)
        return tuple(
            Item(
                index=index,
                plan=seal(layout, medium, keys),
                data=medium.data,
                runs=prompt.runs[index],
                param=medium.part.param,
                tower=tower,
            )
            for index, (medium, layout) in enumerate(zip(media, layouts, strict=True))
        )

    def _make_choices(self, job: Job, prompt: ExpandedPrompt) -> Choices:
        prompts = self._prompts
        toolbox, dialect, aloud = None, None, True
        if isinstance(job, ChatJob):
            toolbox, dialect, aloud = job.toolbox, prompts.dialect, job.include_reasoning
        manner = Manner(
            stop=job.stop,
            include_stop=job.include_stop,
            kept=prompts.kept_ids(special=not job.skip_special, tags=dialect is not None),
        )
        return Choices(
            job.sampling.n,
            lambda: Detokenizer(prompts.vocabulary, manner),
            lambda: AnswerReader(dialect, toolbox, thinking=prompt.opens_thought, aloud=aloud),
            prompt_tokens=len(prompt.token_ids),
        )


def _is_short(job: ChatJob) -> bool:
    """Whether to render it takes less than to hand it to a thread and back."""
    if job.toolbox or job.template_options or len(job.messages) > _SHORT_TURNS:
        return False
    texts = (p.text for m in job.messages for p in m.parts if isinstance(p, TextPart))
    return sum(map(len, texts)) <= _SHORT_CHARS and not any(m.tool_calls for m in job.messages)


def _name(model: str) -> str:
    """A directory's own name; `demo` and hub ids as they are."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _wishes(part: MediaPart, of_request: MediaOptions) -> MediaOptions:
    return of_request if part.options is None else part.options.over(of_request)


def _missing(role: str) -> Unavailable:
    return Unavailable(f"no {role} is available", retry_after_s=PATIENCE_S)
