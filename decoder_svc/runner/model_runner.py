"""Runs step plans on one rank: its stage of the model, its pages, and (last stage) the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from decoder_svc.attention.base import AttentionBackend
from decoder_svc.engine.messages import DecodeRows, StepPlan
from decoder_svc.kv_cache.pool import KVPool
from decoder_svc.models.stage import DecoderStage, MediaRows
from decoder_svc.parallel.pp import StageLink
from decoder_svc.parallel.returns import TokenReturn
from decoder_svc.runner.graphs import DecodeGraphs
from decoder_svc.runner.host_rows import HostRows
from decoder_svc.runner.inputs import StepInputs, build_inputs
from decoder_svc.runner.outcome import Outcome
from decoder_svc.runner.rank_rows import RankRows
from decoder_svc.runner.rows import columns_of, drawing_seats
from decoder_svc.runner.seats import SeatTable
from decoder_svc.sampling.drawn import Drawn
from decoder_svc.sampling.params import Draw, SamplingParams
from decoder_svc.sampling.sampler import Sampler
from decoder_svc.staging import stage


class ModelRunner:
    """One rank's stage; the first takes rows of media in, the last samples, once.

    On a GPU a step is only started here; `Outcome.wait` waits for it.

    Args:
        model: Loaded, on its device.
        pool: The pages.
        attention: Reads and writes them.
        seats: What is kept between steps.
        sampler: Draws tokens.
        rows: [slab rows, levels x hidden] view of the slab that rows of media land in, on the CPU;
            empty behind the first stage.
        link: To the stages before and after; None when there are none.
    """

    def __init__(
        self,
        model: DecoderStage,
        *,
        pool: KVPool,
        attention: AttentionBackend,
        seats: SeatTable,
        sampler: Sampler,
        rows: torch.Tensor,
        link: StageLink | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._seats = seats
        self._sampler = sampler
        self._link = link
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._rows = HostRows(rows, self._device)
        self.num_blocks, self.block_size = pool.num_blocks, pool.block_size
        self.rank_rows: RankRows | None = None
        """On the first stage: the slab's second bank, where there is one."""
        self.graphs: DecodeGraphs | None = None
        """Captured; None = every step is launched kernel by kernel."""
        self.returns: TokenReturn | None = None
        """On the first and the last of several stages, when steps are planned ahead."""
        self.ahead = False
        """Whether steps are planned before the host knows the tokens drawn."""

    @property
    def most_rows(self) -> int:
        """Decoding sequences of a step that may be told in columns."""
        return self._seats.spare_seat if self.graphs is None else self.graphs.most

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Outcome | None:
        """Computes a step; where a chunk ends its sequence, the last stage samples.

        Returns:
            The draws, on the rank that tells of them; None on every other.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # threads have a current device each
        if self.returns is not None and self._model.mesh.is_first_stage:
            self.returns.take_in(plan)
        news = self._seats.learn(plan)
        if self.graphs is not None and plan.decodes is not None and not plan.sequences:
            return self._replay(plan, plan.decodes, self.graphs)
        self._seats.place(news)
        return self._compute(plan)

    def close(self) -> None:
        """Lets go of the slab."""
        self._rows.close()

    def _compute(self, plan: StepPlan) -> Outcome | None:
        inputs = build_inputs(plan, self._seats, block_size=self.block_size, device=self._device)
        self._attention.plan(inputs.batch, inputs.slots)
        media = self._media(inputs)
        entered = self._enter(inputs, media)
        is_last = self._model.mesh.is_last_stage
        keep = self._kept(inputs) if is_last else None
        hidden = self._model(entered, inputs.positions, self._attention, media, keep)
        if not is_last:
            self._pass_on(plan, hidden, inputs.drawing_seats)
            return None
        drawn = None
        if draws := _draws_of(plan):  # every peer holds a part of the vocabulary
            logits = self._model.logits(hidden)
            if self.ahead or self._model.mesh.tp_rank == 0:
                drawn = self._sample(logits, draws)
                self._keep(drawn, inputs.drawing_seats)
        return self._tell(plan, drawn)

    def _replay(self, plan: StepPlan, rows: DecodeRows, graphs: DecodeGraphs) -> Outcome | None:
        columns = columns_of(rows)
        hidden = None
        if not self._model.mesh.is_first_stage:
            hidden = self._receive(columns.shape[1])
        output = graphs.replay(columns, hidden)
        if not self._model.mesh.is_last_stage:
            self._pass_on(plan, output.hidden.clone(), None)
            return None
        drawn, logits = output.drawn, output.logits
        assert drawn is not None and logits is not None, "the last stage draws"
        if rows.draws:
            drawn = self._sample(self._model.head.gather(logits), rows.draws)
            self._keep(drawn, stage(drawing_seats(plan), self._device))
        elif self.returns is not None:
            self.returns.send(drawn.tokens)
        return self._tell(plan, drawn)

    def _kept(self, inputs: StepInputs) -> torch.Tensor:
        """The tokens that matter behind the last layer: those that are drawn from, at least one."""
        at = inputs.draws_at
        return at if len(at) else torch.zeros(1, dtype=torch.int64, device=self._device)

    def _enter(self, inputs: StepInputs, media: MediaRows | None) -> torch.Tensor:
        """[T, hidden] as the stage begins: embedded, or from the stage before."""
        if self._model.mesh.is_first_stage:
            return self._model.embed(inputs.token_ids, media)
        return self._receive(len(inputs.slots))

    def _receive(self, num_tokens: int) -> torch.Tensor:
        assert self._link is not None, "a stage without the one before"
        return self._link.receive(num_tokens)

    def _pass_on(self, plan: StepPlan, hidden: torch.Tensor, seats: torch.Tensor | None) -> None:
        assert self._link is not None, "a stage without the next one"
        self._link.send(hidden)
        if self.returns is not None and self._model.mesh.is_first_stage:
            if seats is None:
                seats = stage(drawing_seats(plan), self._device)
            self.returns.expect(plan, seats)

    def _sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> Drawn:
        """Every rank of the stage has the same tokens afterwards, if it is to use them."""
        mesh = self._model.mesh
        drawn = self._sampler.sample(logits, draws)
        if self.ahead and mesh.tp_size > 1 and not all(draw.params.is_plain for draw in draws):
            dist.broadcast(drawn.tokens, src=mesh.rank - mesh.tp_rank, group=mesh.tp_group)
        return drawn

    def _keep(self, drawn: Drawn, seats: torch.Tensor) -> None:
        """Lets the next steps know what was drawn."""
        if self.returns is not None:
            self.returns.send(drawn.tokens)
        else:
            self._seats.note(seats, drawn.tokens)

    def _tell(self, plan: StepPlan, drawn: Drawn | None) -> Outcome | None:
        return Outcome(plan.step, drawn, self._device) if self._model.mesh.tp_rank == 0 else None

    def _media(self, inputs: StepInputs) -> MediaRows | None:
        """First stage: the step's rows, copied, so that the slab's slots may be reused after it."""
        if not self._model.mesh.is_first_stage or not len(inputs.slab_rows):
            return None
        if self.rank_rows is not None:
            placed = self.rank_rows.gather(self._rows, inputs.slab_rows, self._dtype)
        else:
            placed = self._rows.take(inputs.slab_rows, self._dtype)
        return MediaRows(inputs.embeds_at, placed, self._model.config.hidden_size)


_LIKELIEST = Draw(SamplingParams(max_tokens=1, temperature=0.0), 0, 0)


def _draws_of(plan: StepPlan) -> list[Draw]:
    """The draws of a step, in the order of its plan."""
    draws: list[Draw] = []
    if (rows := plan.decodes) is not None:
        draws += rows.draws or [_LIKELIEST] * columns_of(rows).shape[1]
    draws += [s.draw for s in plan.sequences if s.draw is not None]
    return draws
