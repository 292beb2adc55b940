"""Step plans replayed on a clock: the micro-batches in flight keep every pipeline stage busy."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from decoder_svc.engine.messages import StepPlan, StepResult
from tests.unit.decoder.simulation import SimulatedRanks, Simulation, expected, make_request

STAGES = 4
LAUNCH_S = 0.010  # what a stage takes for any micro-batch
SEQUENCE_S = 0.0005  # and for each of its sequences
ENGINE_S = 0.0005  # from a result to the next plan on its way
HOP_S = 0.0001  # between stages


class ClockedPipeline(SimulatedRanks):
    """Stages in a row; each takes micro-batches in order, as they come from the one before."""

    def __init__(self, *, block_size: int) -> None:
        super().__init__(block_size=block_size, depth=STAGES)
        self.now = 0.0
        self.measured_from = 0.0
        self.sizes: list[int] = []
        self._free_at = [0.0] * STAGES
        self._busy_s = [0.0] * STAGES
        self._done_at: deque[float] = deque()

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.sizes.append(len(plan.sequences))
        self.now += ENGINE_S
        takes = LAUNCH_S + SEQUENCE_S * sum(len(s.token_ids) for s in plan.sequences)
        at = self.now
        for stage in range(STAGES):
            begin = max(at + HOP_S, self._free_at[stage])
            at = self._free_at[stage] = begin + takes
            self._busy_s[stage] += takes
        self._done_at.append(at)

    def collect(self) -> StepResult:
        self.now = max(self.now, self._done_at.popleft() + HOP_S)
        return super().collect()

    def start_measuring(self) -> None:
        """Counts what stages compute from here on; what they have taken on counts already."""
        self.measured_from = self.now
        self._busy_s = [max(0.0, free - self.now) for free in self._free_at]

    @property
    def busy(self) -> list[float]:
        """Share of the time that each stage has computed."""
        ahead = [max(0.0, free - self.now) for free in self._free_at]
        span = self.now - self.measured_from
        return [(b - a) / span for b, a in zip(self._busy_s, ahead, strict=True)]


def decode_steadily(sim: Simulation, num_sequences: int) -> tuple[list[float], list[int]]:
    """How busy stages are, and sizes of micro-batches, while all requests decode."""
    pipeline = clock_of(sim)
    adds = [
        make_request(f"r{i}", [20 + i, 21, 22, 23 + i], max_tokens=60) for i in range(num_sequences)
    ]
    for add in adds:
        sim.add(add)
    while not all(told.tokens() for told in sim.told.values()):
        sim.step()
    for _ in range(2 * STAGES):  # the stages settle
        sim.step()
    pipeline.start_measuring()
    pipeline.sizes.clear()
    while not any(told.over for told in sim.told.values()):
        sim.step()
    busy, sizes = pipeline.busy, list(pipeline.sizes)
    sim.run()
    for add in adds:
        assert sim.told[add.request_id].tokens() == expected(add)
    return busy, sizes


def pipelined() -> Simulation:
    ranks = ClockedPipeline(block_size=4)
    return Simulation(num_blocks=1000, max_running=64, depth=STAGES, chunk_tokens=256, ranks=ranks)


def clock_of(sim: Simulation) -> ClockedPipeline:
    assert isinstance(sim.ranks, ClockedPipeline)
    return sim.ranks


@pytest.mark.parametrize("num_sequences", [4, 16, 18, 31, 64])
def test_every_stage_is_busy_nine_tenths_of_the_time(num_sequences: int) -> None:
    busy, sizes = decode_steadily(pipelined(), num_sequences)
    assert min(busy) >= 0.9, busy
    assert max(sizes) <= -(-num_sequences // STAGES)


def test_without_a_share_per_stage_the_pipeline_stands_idle() -> None:
    sim = pipelined()
    sim.scheduler._limits = replace(sim.scheduler._limits, depth=1)
    busy, _ = decode_steadily(sim, 16)
    assert max(busy) < 0.5, busy


def test_prompts_that_come_at_once_are_spread_over_the_stages() -> None:
    sim = pipelined()
    pipeline = clock_of(sim)
    for index in range(12):
        sim.add(make_request(f"r{index}", [30 + index] * 8, max_tokens=2))
    for _ in range(STAGES):
        sim.step()
    assert len(pipeline.sizes) == STAGES and max(pipeline.sizes) == 3
    sim.run()


def test_one_sequence_is_never_in_two_micro_batches_before_its_token_is_known() -> None:
    sim = pipelined()
    pipeline = clock_of(sim)
    add = make_request("alone", [20, 21, 22], max_tokens=6)
    sim.add(add)
    while not sim.told["alone"].over:
        sim.step()
        assert len(pipeline._plans) <= 1
    assert sim.told["alone"].tokens() == expected(add)
