"""Random checkpoints of full size, made on the device and written in hub layout.

The reference model they are made of stays on the device: it need not be loaded to be compared with.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.family_shapes import FullSize, add_vocabulary
from chiasm.checkpoint import WEIGHT_INDEX
from chiasm.kernels.block_scaled import BLOCK, FP8, LARGEST, multiply_out
from tests.checkpoints import DEMO
from tests.families import FAMILIES, add_processor

_SHARD_BYTES = 5 << 30
_PIECE_BYTES = 16 << 20
_THREADS = 8
_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", FP8: "F8_E4M3"}
_EIGHT_BITS = re.compile(r"language_model\.layers\..*_proj\.weight")
_RESIDUAL = re.compile(
    r"\.(blocks|layers?|layer)\.\d+\..*"
    r"(o_proj|down_proj|attn\.proj|projection_layer|linear_fc2|mlp\.fc2)(\.weight)?$"
)
_INTERN = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


def make_reference(shape: FullSize, *, device: torch.device, small: bool) -> Any:
    """transformers' model in bfloat16 on the device, with weights of our own choice."""
    import transformers

    demo = json.loads((DEMO / "config.json").read_text())
    model_class = getattr(transformers, shape.architecture)
    config = model_class.config_class(**shape.arguments(demo, small=small))
    with device:
        model = model_class._from_config(config, dtype=torch.bfloat16)
    model.to(device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, config, generator)
    return model


def _draw(name: str, weight: torch.Tensor, config: Any, generator: torch.Generator) -> None:
    """Activations keep their size, and what layers add to the residual stream sums to it.

    Routers tell experts apart as trained ones do: the last expert chosen has a small weight, so
    that two ways of rounding differ little when they choose another one.
    """
    mean, std = 0.0, 0.02
    if weight.dim() == 1 or "lambda_" in name:
        if "lambda_" in name:
            mean, std = 0.3, 0.05
        elif name.endswith("weight"):
            mean, std = 1.0, 0.1
    elif name.endswith("mlp.gate.weight"):
        std = 3.0 * weight.shape[1] ** -0.5
    elif "embed" in name or "cls_token" in name:
        std = 0.1 if weight.dim() < 4 else weight[0].numel() ** -0.5
    else:
        fan_in = weight.shape[-1] if weight.dim() == 3 else weight[0].numel()
        std = fan_in**-0.5
        if _RESIDUAL.search(name):
            part = config.text_config if "language_model" in name else config.vision_config
            depth = getattr(part, "num_hidden_layers", None) or part.depth
            std *= (2 * depth) ** -0.5
    weight.normal_(mean, std, generator=generator)


def hub_tensors(
    model: Any, *, intern: bool, eight_bits: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values as public checkpoints have them; fused experts have inputs first.

    With `eight_bits` dense matrices of the language model's layers are rounded to 8 bits with a
    scale for each block of 128 x 128, in the model too.
    """
    for name, parameter in model.named_parameters():
        stored, tensor = name, parameter.detach()
        for ours, theirs in _INTERN.items() if intern else ():
            if name.startswith(ours):
                stored = theirs + name.removeprefix(ours)
        if tensor.dim() == 3 and ".experts." in name:
            width = model.config.text_config.hidden_size
            if name.endswith("gate_up_proj") == (tensor.shape[2] == width):
                tensor = tensor.transpose(1, 2)
        if eight_bits and _EIGHT_BITS.search(name) and tensor.dim() == 2:
            values, scales = _in_eight_bits(tensor)
            tensor.copy_(multiply_out(values, scales))
            yield f"{stored}_scale_inv", scales
            yield stored, values
        else:
            yield stored, tensor


def _in_eight_bits(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a matrix of whole blocks."""
    blocks = matrix.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / LARGEST
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return values.to(FP8), scales


def write_checkpoint(
    model: Any, shape: FullSize, directory: Path, *, eight_bits: bool = False
) -> int:
    """Writes all files a service reads; returns the bytes of the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[shape.family]
    add_processor(
        dataclasses.replace(
            family, image=family.image | shape.image, video=family.video | shape.image
        ),
        directory,
    )
    if family.tiled:
        sizes = {"processor_class": family.processor, "image_seq_length": 256}
        (directory / "processor_config.json").write_text(json.dumps(sizes))
    model.config.architectures = [shape.architecture]
    model.config.save_pretrained(directory)
    add_vocabulary(directory, model.config.text_config.vocab_size)
    if eight_bits:
        path = directory / "config.json"
        said = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        config = json.loads(path.read_text()) | {"quantization_config": said}
        path.write_text(json.dumps(config))
    with torch.no_grad():
        tensors = list(hub_tensors(model, intern=family.tiled, eight_bits=eight_bits))
    return _write_weights(tensors, directory)


def _write_weights(tensors: list[tuple[str, torch.Tensor]], directory: Path) -> int:
    shards: list[list[tuple[str, torch.Tensor]]] = [[]]
    room = _SHARD_BYTES
    for name, tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = _SHARD_BYTES
        shards[-1].append((name, tensor))
        room -= tensor.nbytes
    where = {}
    lanes = threading.local()
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            where.update({name: file for name, _ in shard})
            _write_shard(shard, directory / file, pool, lanes)
    total = sum(tensor.nbytes for _, tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / WEIGHT_INDEX).write_text(json.dumps(index))
    return total


def _write_shard(
    shard: list[tuple[str, torch.Tensor]],
    path: Path,
    pool: ThreadPoolExecutor,
    lanes: threading.local,
) -> None:
    header, end = {}, 0
    for name, tensor in shard:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
        at, pending = 8 + len(text), []
        for _, tensor in shard:
            # Lines of the first dimension, so that a transposed tensor is copied bit by bit.
            width = max(1, math.prod(tensor.shape[1:]) * tensor.itemsize)
            step = max(1, _PIECE_BYTES // width)
            for first in range(0, tensor.shape[0], step):
                part = tensor[first : first + step]
                pending.append(pool.submit(_write, fd, part, at, lanes))
                at += part.nbytes
        for future in pending:
            future.result()
    finally:
        os.close(fd)


@torch.inference_mode()
def _write(fd: int, tensor: torch.Tensor, begin: int, lanes: threading.local) -> None:
    values = tensor.contiguous()
    if values.is_cuda:
        if not hasattr(lanes, "stream"):
            lanes.stream = torch.cuda.Stream(values.device)
            lanes.buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        torch.cuda.current_stream(values.device).synchronize()  # what it was copied by
        host = lanes.buffer
        if values.nbytes > len(host):
            host = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=True)
        host = host[: values.nbytes]
        with torch.cuda.stream(lanes.stream):
            host.copy_(values.flatten().view(torch.uint8), non_blocking=True)
        lanes.stream.synchronize()
        values = host
    data = memoryview(values.flatten().view(torch.uint8).numpy())
    while data:
        count = os.pwrite(fd, data, begin)
        data, begin = data[count:], begin + count
