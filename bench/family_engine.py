"""One family's tower and engine in this process, beside the reference, given the same weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from chiasm.config.decoder import DecoderConfig, MemoryConfig, SchedulerConfig
from decoder_svc import assembly
from decoder_svc.runner.graphs import DecodeGraphs, DecodeOutput
from decoder_svc.runner.inputs import StepInputs
from encoder_svc.runner import TowerRunner
from gateway.prompt import PromptBuilder
from tests.layouts import LaidOut
from tests.parity.harness import Prepared, Served, request

REPEATS = 3
"""Of loading, and of reading the same files."""


class Stopwatch:
    """Seconds by name, of what runs on the device too."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    def time(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = call(*args, **kwargs)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] = time.perf_counter() - began
            print(f"  {name}: {self.seconds[name]:.2f} s", flush=True)
            return found

        return timed

    def best(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call made `REPEATS` times, its results let go of but for the last one's.

        Its seconds are the least, as those of reading are; the first call's are kept beside them.
        """

        def timed(*args: Any, **kwargs: Any) -> Any:
            once, seconds, found = self.time(name, call), [], None
            for _ in range(REPEATS):
                del found
                gc.collect()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
                found = once(*args, **kwargs)
                seconds.append(self.seconds[name])
            self.seconds[name], self.seconds[f"{name}, first"] = min(seconds), seconds[0]
            return found

        return timed


class Prepares(Served):
    """`Served` with a reference that is there already and a tower on its device."""

    def __init__(self, path: Path, reference: Any, runner: TowerRunner) -> None:
        self.path = path
        self.reference = reference
        self.builder = PromptBuilder(path)
        self.runner = runner


class Loaded(LaidOut):
    """An engine whose logits, of all tokens of a prompt and of every step, are kept."""

    def __init__(self, path: Path, device: torch.device, watch: Stopwatch) -> None:
        config = DecoderConfig(
            model=str(path),
            memory=MemoryConfig(kv_blocks=512),
            scheduler=SchedulerConfig(max_running_requests=8, chunked_prefill_size=8192),
            device=str(device),
            dtype="bfloat16",
            fp8_matmul=True,
        )
        plain = assembly.load_stage
        assembly.load_stage = watch.best("load language model", plain)  # type: ignore[assignment]
        try:
            watch.time("engine", self.open)(config, path, segment_rows=512)
        finally:
            assembly.load_stage = plain
        self.runner: Any = self.parts.executor._runner
        self.tap = Tap(self.runner)

    def answer(self, name: str, made: Prepared, num_tokens: int) -> tuple[list[int], float]:
        """Greedy tokens and seconds."""
        self.put(request(self, name, made, max_tokens=num_tokens))
        began = time.perf_counter()
        self.run(within_s=120.0)
        taken = time.perf_counter() - began
        return self.outcomes[name].tokens(), taken


class Tap:
    """Has the model compute logits of every token and keeps them.

    Args:
        runner: A `ModelRunner`.
    """

    def __init__(self, runner: Any) -> None:
        self.seen: list[torch.Tensor] = []
        self.is_open = False
        self._at = torch.empty(0, dtype=torch.int64)
        model, kept = runner._model, runner._kept
        forward, logits = model.forward, model.logits

        def keep_all(inputs: StepInputs) -> torch.Tensor:
            if not self.is_open:
                return kept(inputs)
            self._at = inputs.draws_at
            return torch.arange(len(inputs.slots), device=inputs.slots.device)

        def with_logits(*args: Any) -> torch.Tensor:
            hidden = forward(*args)
            if self.is_open:  # also of a chunk that nothing is drawn from
                self.seen.append(logits(hidden))
            return hidden

        def drawn_from(hidden: torch.Tensor) -> torch.Tensor:
            return logits(hidden.index_select(0, self._at) if self.is_open else hidden)

        runner._kept, model.forward, model.logits = keep_all, with_logits, drawn_from
        if runner.graphs is not None:
            runner.graphs = _Tapped(runner.graphs, self)


class _Tapped:
    def __init__(self, graphs: DecodeGraphs, tap: Tap) -> None:
        self._graphs, self._tap = graphs, tap
        self.most = graphs.most

    def replay(self, columns: Any, hidden: torch.Tensor | None) -> DecodeOutput:
        output = self._graphs.replay(columns, hidden)
        if self._tap.is_open:
            assert output.logits is not None
            self._tap.seen.append(output.logits.clone())
        return output


@dataclass(frozen=True)
class Likeness:
    """Cosines of vectors with their counterparts."""

    least: float
    mean: float
    whole: float
    """Of all of them as one."""

    @classmethod
    def of(cls, ours: torch.Tensor, theirs: torch.Tensor) -> Likeness:
        """Vectors are the last dimension."""
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        found, sums = [], torch.zeros(3, dtype=torch.float64, device=ours.device)
        for a, b in zip(ours.split(256), theirs.split(256), strict=True):
            a, b = a.float(), b.to(a.device).float()  # noqa: PLW2901
            found.append(F.cosine_similarity(a, b, dim=-1).flatten())
            sums += torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum()]).double()
        cosines = torch.cat(found)
        whole = sums[0] / (sums[1] * sums[2]).sqrt()
        return cls(*(round(float(x), 6) for x in (cosines.min(), cosines.mean(), whole)))


@torch.inference_mode()
def reference_logits(served: Prepares, made: Prepared, tokens: list[int]) -> torch.Tensor:
    """[prompt + tokens - 1, vocabulary]: of the prompt and of every token but the last."""
    ids = (*made.ids, *tokens[:-1])
    device = next(served.reference.parameters()).device
    with device:
        inputs = served.reference_inputs(replace(made, ids=ids))
        inputs = {key: value.to(device) for key, value in inputs.items()}
        out = served.reference(**inputs, use_cache=False)
    return out.logits[0]


@torch.inference_mode()
def reference_rows(served: Prepares, made: Prepared) -> torch.Tensor:
    """[rows, levels x hidden]."""
    with next(served.reference.parameters()).device:
        return torch.cat(served.reference_rows(made))
