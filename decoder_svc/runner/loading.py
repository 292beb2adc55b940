"""Builds one rank's runner from a checkpoint: stage, weights, pages, attention, sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from chiasm.allocator import keep_freed_memory
from chiasm.config import DecoderConfig
from chiasm.kernels.block_scaled import FP8
from chiasm.rows import RowFormat
from decoder_svc.attention.choice import build_attention, wants_flashinfer
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.kv_cache.pool import KVPool, page_bytes
from decoder_svc.models.stage import DecoderStage
from decoder_svc.models.weights import CheckpointReader, place
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.pp import StageLink
from decoder_svc.parallel.returns import TokenReturn
from decoder_svc.runner.graphs import DecodeGraphs, graph_sizes
from decoder_svc.runner.model_runner import ModelRunner
from decoder_svc.runner.seats import SeatTable
from decoder_svc.sampling.grammar import GrammarCompiler
from decoder_svc.sampling.grammar_masks import GrammarMasks
from decoder_svc.sampling.greedy import Greedy
from decoder_svc.sampling.sampler import Sampler

_FP8_CAPABILITY = (8, 9)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank computes, and in what."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """As in configs and row formats."""
        return str(self.dtype).removeprefix("torch.")


def choose_placement(config: DecoderConfig, *, local_rank: int = 0) -> Placement:
    """Resolves `auto`; ranks of a machine take its GPUs in order, from the one named on.

    Raises:
        ValueError: A device that is not there, or an unknown dtype.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {config.device}: no CUDA device here")
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + local_rank)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"{device} is not there: {torch.cuda.device_count()} GPUs are")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype must be auto or one of {', '.join(_DTYPES)}, got {dtype!r}")
    return Placement(device, _DTYPES[dtype])


def eight_bits_run(placement: Placement) -> bool:
    """Whether products of 8 bits can be computed as such there."""
    if placement.device.type != "cuda" or placement.dtype is torch.float32:
        return False
    return torch.cuda.get_device_capability(placement.device) >= _FP8_CAPABILITY


def load_stage(
    model_dir: Path,
    text: TextConfig,
    mesh: ParallelMesh,
    placement: Placement,
    *,
    load_format: str = "auto",
    fp8_matmul: bool = False,
) -> DecoderStage:
    """The stage with its weights: the checkpoint's, or random ones with `load_format` dummy.
    FP8 ones stay as they are with `fp8_matmul`, where such products can be computed.

    Raises:
        ValueError: Naming tensors that are missing or unknown.
    """
    eight_bits = text.eight_bits and fp8_matmul and eight_bits_run(placement)
    text = replace(text, eight_bits=eight_bits)
    with torch.device("meta"):
        model = DecoderStage(text, mesh)
    for name, weight in model.named_parameters():
        if weight.dtype is not FP8 and not name.endswith(".scales"):
            weight.data = weight.data.to(placement.dtype)
    model.eval()
    if load_format == "dummy":
        place(model, placement.device)
        _fill(model)
        return model
    with CheckpointReader(model_dir, placement.device) as reader, torch.inference_mode():
        reader.check(text)
        reader.expect_bytes(sum(p.nbytes for p in model.parameters()))
        model.load(reader)
        reader.wait()
    return model


def _fill(model: DecoderStage) -> None:
    """Random weights under which activations stay of a size: the same in any dtype."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if name.endswith(".scales"):
                weight.fill_(1.0)
            elif weight.dim() > 1:
                drawn = torch.empty_like(weight, dtype=torch.bfloat16)
                weight.copy_(drawn.normal_(std=0.02, generator=generator))
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
    model.place_constants()


def count_pages(
    config: DecoderConfig, text: TextConfig, mesh: ParallelMesh, placement: Placement
) -> int:
    """Pages of K and V that this rank can hold. Call it with the weights loaded.

    Raises:
        ValueError: Not even one page fits.
    """
    memory = config.memory
    if memory.kv_blocks:
        return memory.kv_blocks
    size = page_bytes(text, mesh, block_size=memory.block_size, dtype=placement.dtype)
    budget = memory.kv_bytes // (mesh.tp_size * mesh.pp_size)
    if placement.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left behind is room, too
        free, total = torch.cuda.mem_get_info(placement.device)
        budget = int(total * memory.mem_fraction_static) - (total - free)
    if budget < size:
        raise ValueError(f"no room for K and V: {budget} bytes, one page takes {size}")
    return budget // size


def plans_ahead(config: DecoderConfig) -> bool:
    """Whether steps are planned before the tokens of the one before are known."""
    wanted = config.scheduler.async_scheduling
    if wanted == "auto":
        return choose_placement(config).device.type == "cuda"
    return wanted == "on"


def build_runner(
    config: DecoderConfig,
    model: DecoderStage,
    *,
    num_blocks: int,
    rows: torch.Tensor,
    grammars: GrammarCompiler,
    link: StageLink | None = None,
) -> ModelRunner:
    """The runner of a rank, its pages, and the graphs of its decode steps.

    Args:
        config: Of the decoder.
        model: Loaded.
        num_blocks: Pages to take.
        rows: The slab, see `slab_rows`, or nothing behind stage 0.
        grammars: Compiles what answers are to look like.
        link: To the stages before and after.

    Raises:
        ValueError: An attention backend that this machine or model does not allow.
    """
    keep_freed_memory()
    text, mesh = model.config, model.mesh
    weight = next(model.parameters())
    device = weight.device
    block_size = config.memory.block_size
    pool = KVPool(
        text,
        mesh,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=weight.dtype,
        device=device,
        heads_first=wants_flashinfer(config.attention_backend, weight, head_dim=text.head_dim),
    )
    longest = min(config.max_model_len or text.max_positions, num_blocks * block_size)
    seats = SeatTable(config.scheduler.max_running_requests, -(-longest // block_size) + 1, device)
    attention = build_attention(pool, seats, text=text, mesh=mesh)
    masks = GrammarMasks(grammars, text.masked_token_ids)
    sampler = Sampler(text.masked_token_ids, device=device, grammars=masks)
    runner = ModelRunner(
        model, pool=pool, attention=attention, seats=seats, sampler=sampler, rows=rows, link=link
    )
    runner.ahead = plans_ahead(config)
    if runner.ahead and mesh.pp_size > 1 and (mesh.is_first_stage or mesh.is_last_stage):
        runner.returns = TokenReturn(mesh, mesh.return_group, seats)
    if config.cuda_graphs and attention.can_be_captured:
        runner.graphs = DecodeGraphs(
            graph_sizes(config.scheduler.max_running_requests),
            model=model,
            attention=attention,
            seats=seats,
            greedy=_greedy(model, device) if mesh.is_last_stage else None,
            block_size=block_size,
        )
        runner.graphs.capture()
    return runner


def _greedy(model: DecoderStage, device: torch.device) -> Greedy:
    masked = model.config.masked_token_ids
    return Greedy(model.head.own, masked, mesh=model.mesh, device=device)


def slab_rows(view: memoryview, rows: RowFormat) -> torch.Tensor:
    """The slab's bytes as [rows, levels x hidden], shared, not copied."""
    dtype, width = _DTYPES[rows.dtype], rows.levels * rows.hidden_size
    usable = len(view) // rows.row_bytes * width
    return torch.frombuffer(view, dtype=dtype, count=usable).view(-1, width)
