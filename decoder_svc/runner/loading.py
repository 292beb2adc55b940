"""Builds one rank's runner from a checkpoint: stage, weights, pages, attention, sampler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from chiasm.allocator import keep_freed_memory
from chiasm.config import DecoderConfig
from decoder_svc.attention.reference import ReferenceAttention
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.kv_cache.pool import KVPool, page_bytes
from decoder_svc.models.base import StageModel
from decoder_svc.models.registry import model_class
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.pp import StageLink
from decoder_svc.runner.model_runner import ModelRunner
from decoder_svc.sampling.sampler import Sampler

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_OPTIONAL = frozenset({"lm_head.weight"})  # a tied checkpoint may store it all the same


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


def load_stage(
    model_dir: Path, text: TextConfig, mesh: ParallelMesh, placement: Placement
) -> StageModel:
    """The stage with its weights. Raises ValueError naming tensors that are missing or unknown."""
    family = model_class(text.architecture)
    with torch.device("meta"):
        model = family(text, mesh).to(placement.dtype)
    model.to_empty(device=placement.device)
    model.eval()
    with CheckpointReader(model_dir) as reader, torch.inference_mode():
        reader.check(family.tensor_names(text), optional=_OPTIONAL if text.tied else frozenset())
        reader.expect_bytes(sum(p.nbytes for p in model.parameters()))
        model.load(reader)
    return model


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
        free, total = torch.cuda.mem_get_info(placement.device)
        budget = int(total * memory.mem_fraction_static) - (total - free)
    if budget < size:
        raise ValueError(f"no room for K and V: {budget} bytes, one page takes {size}")
    return budget // size


def build_runner(
    model: StageModel, pool: KVPool, rows: torch.Tensor, link: StageLink | None = None
) -> ModelRunner:
    """The runner of a rank. `rows` is the slab as [rows, hidden], or nothing behind stage 0."""
    keep_freed_memory()
    sampler = Sampler(model.config.masked_token_ids, device=pool.keys.device)
    return ModelRunner(
        model,
        pool=pool,
        attention=ReferenceAttention(pool),
        sampler=sampler,
        rows=rows,
        link=link,
    )


def build_pool(
    text: TextConfig, mesh: ParallelMesh, placement: Placement, *, num_blocks: int, block_size: int
) -> KVPool:
    """The rank's pages."""
    return KVPool(
        text,
        mesh,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=placement.dtype,
        device=placement.device,
    )


def slab_rows(view: memoryview, *, hidden_size: int, dtype_name: str) -> torch.Tensor:
    """The slab's bytes as [rows, hidden], shared, not copied."""
    dtype = _DTYPES[dtype_name]
    usable = len(view) // (hidden_size * dtype.itemsize) * hidden_size
    return torch.frombuffer(view, dtype=dtype, count=usable).view(-1, hidden_size)
