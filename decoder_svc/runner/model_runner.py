"""Runs step plans on one rank: its stage of the model, its pages, and (last stage) the sampler."""

from __future__ import annotations

import torch

from decoder_svc.attention.base import AttentionBackend
from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.kv_cache.pool import KvPool
from decoder_svc.models.base import StageModel
from decoder_svc.runner.inputs import StepInputs, build_inputs
from decoder_svc.sampling.sampler import Sampler


class ModelRunner:
    """One rank that is first and last stage at once.

    Args:
        model: Loaded, on its device.
        pool: The pages.
        attention: Reads and writes them.
        sampler: Draws tokens.
        rows: [slab rows, hidden] view of the slab that rows of media land in, on the CPU.
    """

    def __init__(
        self,
        model: StageModel,
        *,
        pool: KvPool,
        attention: AttentionBackend,
        sampler: Sampler,
        rows: torch.Tensor,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._rows = rows
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self.num_blocks, self.block_size = pool.num_blocks, pool.block_size

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step and samples where its chunks end their sequences."""
        inputs = build_inputs(plan, block_size=self.block_size, device=self._device)
        self._attention.plan(inputs.batch, inputs.slots)
        hidden = self._model.embed(inputs.token_ids, self._gather(inputs), inputs.embeds_at)
        hidden = self._model(hidden, inputs.positions, self._attention)
        draws = [s.draw for s in plan.sequences if s.draw is not None]
        if not draws:
            return StepResult(plan.step, ())
        logits = self._model.logits(hidden.index_select(0, inputs.draws_at))
        return StepResult(plan.step, tuple(self._sampler.sample(logits, draws)))

    def close(self) -> None:
        """Lets go of the slab."""
        self._rows = torch.empty(0, self._rows.shape[1])

    def _gather(self, inputs: StepInputs) -> torch.Tensor:
        """[R, hidden]: a copy, so that the slab's slots may be reused once the step is back."""
        rows = self._rows.index_select(0, inputs.slab_rows)
        return rows.to(device=self._device, dtype=self._dtype)
