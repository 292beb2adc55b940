"""Runs step plans on one rank: its stage of the model, its pages, and (last stage) the sampler."""

from __future__ import annotations

import torch

from decoder_svc.attention.base import AttentionBackend
from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.kv_cache.pool import KVPool
from decoder_svc.models.base import StageModel
from decoder_svc.parallel.pp import StageLink
from decoder_svc.runner.inputs import StepInputs, build_inputs
from decoder_svc.sampling.params import Sampled
from decoder_svc.sampling.sampler import Sampler


class ModelRunner:
    """One rank's stage; the first takes rows of media in, the last samples, once.

    Args:
        model: Loaded, on its device.
        pool: The pages.
        attention: Reads and writes them.
        sampler: Draws tokens.
        rows: [slab rows, hidden] view of the slab that rows of media land in, on the CPU; empty
            behind the first stage.
        link: To the stages before and after; None when there are none.
    """

    def __init__(
        self,
        model: StageModel,
        *,
        pool: KVPool,
        attention: AttentionBackend,
        sampler: Sampler,
        rows: torch.Tensor,
        link: StageLink | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._rows = rows
        self._link = link
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self.num_blocks, self.block_size = pool.num_blocks, pool.block_size

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult | None:
        """Computes a step; where a chunk ends its sequence, one rank of the last stage samples.

        Returns:
            The draws, on the rank that samples; None on every other.
        """
        mesh = self._model.mesh
        inputs = build_inputs(plan, block_size=self.block_size, device=self._device)
        self._attention.plan(inputs.batch, inputs.slots)
        hidden = self._model(self._enter(inputs), inputs.positions, self._attention)
        if not mesh.is_last_stage:
            assert self._link is not None, "a stage without the next one"
            self._link.send(hidden)
            return None
        draws = [s.draw for s in plan.sequences if s.draw is not None]
        sampled: list[Sampled] = []
        if draws:  # every peer holds a part of the vocabulary
            logits = self._model.logits(hidden.index_select(0, inputs.draws_at))
            if mesh.tp_rank == 0:
                sampled = self._sampler.sample(logits, draws)
        return StepResult(plan.step, tuple(sampled)) if mesh.tp_rank == 0 else None

    def _enter(self, inputs: StepInputs) -> torch.Tensor:
        """[T, hidden] as the stage begins: embedded, or from the stage before."""
        if self._model.mesh.is_first_stage:
            return self._model.embed(inputs.token_ids, self._gather(inputs), inputs.embeds_at)
        assert self._link is not None, "a stage without the one before"
        return self._link.receive(len(inputs.slots))

    def close(self) -> None:
        """Lets go of the slab."""
        self._rows = torch.empty(0, self._rows.shape[1])

    def _gather(self, inputs: StepInputs) -> torch.Tensor:
        """[R, hidden]: a copy, so that the slab's slots may be reused once the step is back."""
        rows = self._rows.index_select(0, inputs.slab_rows)
        return rows.to(device=self._device, dtype=self._dtype)
