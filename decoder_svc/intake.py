"""From the wire to the engine: a GenerateStart is checked field by field and becomes an AddRequest.

What passes here cannot make the engine raise: ids are in the vocabulary, lengths fit, promises and
placeholders agree. Errors name the field.
"""

from __future__ import annotations

import itertools
import math

from chiasm.digest import DIGEST_BYTES
from chiasm.errors import InvalidRequest, ModelNotFound, TooLarge
from chiasm.plan import Modality, Promise, Span
from chiasm.v1 import decoder_pb2
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.engine.messages import AddRequest
from decoder_svc.models.mrope import prompt_positions
from decoder_svc.sampling.params import SamplingParams


class Intake:
    """Checks requests against one model.

    Args:
        text: The model.
        max_model_len: Most tokens of prompt and answer.
        max_choices: Most choices of one request.
    """

    def __init__(self, text: TextConfig, *, max_model_len: int, max_choices: int) -> None:
        self._text = text
        self._max_model_len = max_model_len
        self._max_choices = max_choices

    def admit(self, start: decoder_pb2.GenerateStart, grammar: str = "") -> AddRequest:
        """The engine's request. `grammar` is the start's own, checked.

        Raises:
            InvalidRequest: A field is wrong; `param` names it.
            TooLarge: The prompt leaves no room for an answer.
            ModelNotFound: It asks for an adapter.
        """
        context = start.context
        if context.adapter_id:
            raise ModelNotFound(f"no adapter {context.adapter_id!r} here", param="model")
        prompt = tuple(start.prompt_token_ids)
        self._check_prompt(prompt)
        promises = self._promises(start, prompt)
        grid, delta = self._positions(len(prompt), promises)
        sampling = self._sampling(start.sampling, len(prompt), grammar)
        return AddRequest(
            request_id=context.request_id,
            prompt_ids=prompt,
            sampling=sampling,
            promises=promises,
            grid_positions=grid,
            position_delta=delta,
            cache_salt=context.cache_salt,
            priority=context.priority,
            resume=self._resume(start, sampling.n),
        )

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt_token_ids")
        self._check_ids(prompt, "prompt_token_ids")
        if len(prompt) >= self._max_model_len:
            raise TooLarge(
                f"the prompt has {len(prompt)} tokens; with at least one token of answer the "
                f"model takes {self._max_model_len}",
                param="messages",
            )

    def _check_ids(self, ids: tuple[int, ...], param: str) -> None:
        if ids and max(ids) >= self._text.vocab_size:
            raise InvalidRequest(
                f"token id {max(ids)} is outside the vocabulary of {self._text.vocab_size}",
                param=param,
            )

    def _promises(
        self, start: decoder_pb2.GenerateStart, prompt: tuple[int, ...]
    ) -> tuple[Promise, ...]:
        """Promises that cover every placeholder of the prompt exactly once, in order."""
        try:
            promises = tuple(Promise.from_proto(message) for message in start.promises)
        except ValueError as error:
            raise InvalidRequest(str(error), param="promises") from None
        edge = 0
        for index, promise in enumerate(promises):
            param = f"promises[{index}]"
            self._check_plan(promise, param)
            for run in promise.runs:
                self._check_run(prompt, edge, run, promise.plan.modality, param)
                edge = run.end
        self._check_text(prompt[edge:])
        if len({promise.item for promise in promises}) != len(promises):
            raise InvalidRequest("two promises for one item", param="promises")
        return promises

    def _check_run(
        self, prompt: tuple[int, ...], edge: int, run: Span, modality: Modality, param: str
    ) -> None:
        """Text from `edge` on, then placeholders of one medium and nothing else."""
        if run.begin < edge or run.end > len(prompt):
            raise InvalidRequest(
                f"placeholders [{run.begin}, {run.end}) overlap others or leave the prompt",
                param=param,
            )
        self._check_text(prompt[edge : run.begin])
        expected = self._placeholder(modality)
        if any(token != expected for token in prompt[run.begin : run.end]):
            raise InvalidRequest(
                f"tokens [{run.begin}, {run.end}) are not all placeholders of one {modality}",
                param=param,
            )

    def _check_plan(self, promise: Promise, param: str) -> None:
        plan, merge = promise.plan, self._text.spatial_merge_size
        if plan.family != self._text.family:
            raise InvalidRequest(
                f"plan of family {plan.family!r}, this is {self._text.family!r}", param=param
            )
        if len(plan.digest) != DIGEST_BYTES:
            raise InvalidRequest(f"digest of {len(plan.digest)} bytes", param=param)
        if len(plan.grids) != 1:
            raise InvalidRequest(f"{len(plan.grids)} grids, one is needed", param=param)
        grid = plan.grids[0]
        rows = grid.t * (grid.h // merge) * (grid.w // merge)
        if rows != plan.num_rows or rows == 0 or grid.h % merge or grid.w % merge:
            raise InvalidRequest(
                f"a grid of {grid.t} x {grid.h} x {grid.w} has {rows} rows, not {plan.num_rows}",
                param=param,
            )
        if grid.t % len(promise.runs) or len({len(run) for run in promise.runs}) > 1:
            raise InvalidRequest(
                f"{len(promise.runs)} runs of placeholders for {grid.t} temporal groups",
                param=param,
            )
        reach = grid.t * plan.seconds_per_grid * self._text.tokens_per_second
        if not 0 <= plan.seconds_per_grid < math.inf or reach > 2**30:
            raise InvalidRequest(f"{plan.seconds_per_grid} seconds per grid", param=param)

    def _placeholder(self, modality: Modality) -> int:
        if modality is Modality.VIDEO:
            return self._text.video_token_id
        return self._text.image_token_id

    def _check_text(self, ids: tuple[int, ...]) -> None:
        for token in (self._text.image_token_id, self._text.video_token_id):
            if token in ids:
                raise InvalidRequest(
                    f"placeholder {token} belongs to no promise", param="prompt_token_ids"
                )

    def _positions(self, num_tokens: int, promises: tuple[Promise, ...]) -> tuple[bytes, int]:
        if not promises or not self._text.mrope_section:
            return b"", 0
        positions = prompt_positions(
            num_tokens,
            promises,
            merge=self._text.spatial_merge_size,
            tokens_per_second=self._text.tokens_per_second,
        )
        return positions.grid.tobytes(), positions.delta

    def _sampling(
        self, wire: decoder_pb2.SamplingParams, prompt_len: int, grammar: str
    ) -> SamplingParams:
        """Zero stands for "not given" where zero itself would be meaningless."""
        room = self._max_model_len - prompt_len
        max_tokens = min(wire.max_tokens or room, room)
        stop = tuple(wire.stop_token_ids)
        bias = tuple((entry.token_id, entry.bias) for entry in wire.logit_bias)
        self._check_ids(stop, "stop_token_ids")
        self._check_ids(tuple(token for token, _ in bias), "logit_bias")
        if not 1 <= (wire.n or 1) <= self._max_choices:
            raise InvalidRequest(f"n must be in [1, {self._max_choices}], got {wire.n}", param="n")
        # An answer whose grammar is complete has ended: there is nothing else it may say.
        eos = () if wire.ignore_eos and not grammar else self._text.eos_token_ids
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                min_tokens=wire.min_tokens,
                temperature=wire.temperature,
                top_p=wire.top_p or 1.0,
                top_k=wire.top_k,
                min_p=wire.min_p,
                presence_penalty=wire.presence_penalty,
                frequency_penalty=wire.frequency_penalty,
                repetition_penalty=wire.repetition_penalty or 1.0,
                seed=wire.seed,
                stop_token_ids=tuple(dict.fromkeys((*eos, *stop))),
                n=wire.n or 1,
                top_logprobs=wire.top_logprobs if wire.HasField("top_logprobs") else None,
                logit_bias=bias,
                grammar=grammar,
            )
        except ValueError as error:
            param = str(error).split(" ", 1)[0]
            raise InvalidRequest(str(error), param=param) from None

    def _resume(self, start: decoder_pb2.GenerateStart, n: int) -> tuple[tuple[int, ...], ...]:
        if not start.resume_from:
            return ()
        outputs: list[tuple[int, ...]] = [()] * n
        for entry in start.resume_from:
            if entry.choice >= n:
                raise InvalidRequest(f"choice {entry.choice} of {n}", param="resume_from")
            ids = tuple(entry.output_ids)
            self._check_ids(ids, "resume_from")
            outputs[entry.choice] = ids
        longest = max(itertools.chain(map(len, outputs), (0,)))
        if len(start.prompt_token_ids) + longest > self._max_model_len:
            raise TooLarge("the output to resume from is too long", param="resume_from")
        return tuple(outputs)
