"""Digests that say which weights, processor and tokenizer a service holds. No torch.

A weights digest covers the config subset concerned, name, dtype and shape of each of its tensors
and 64 KiB of each tensor's bytes, read at fixed places: two fine-tunes differ, 16 GB are not read.
How tensors are spread over files does not matter.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from chiasm.checkpoint import weight_files
from chiasm.json_file import read_json
from chiasm.tensor_header import TensorEntry, read_header
from chiasm.tokenizer_file import tokenizer_files

DIGEST_BYTES = 32
"""Every digest of the contract is a SHA-256."""
TOWER_PREFIXES = (
    *("visual.", "model.visual."),
    *(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    *("vision_model.", "mlp1."),
)
"""Tensors with these names, in any supported checkpoint layout, belong to the vision tower."""

_PIXELS_VERSION = "pixels-1"  # raise when encoder_svc turns the same bytes into other pixels
_VOLATILE = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PIECES = 4
_PIECE_BYTES = 16 * 1024
_HUB_SNAPSHOT = re.compile(r"snapshots/([0-9a-f]{40})$")


def canonical_json(value: object) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def is_tower_tensor(name: str) -> bool:
    """Whether a checkpoint tensor belongs to the vision tower."""
    return name.startswith(TOWER_PREFIXES)


def tower_digest(model_dir: Path, *, full: bool = False) -> bytes:
    """SHA-256 of the vision tower; empty when the checkpoint holds none. Raises ValueError."""
    config = read_json(model_dir / "config.json")
    subset = {"vision_config": _stable(config.get("vision_config", {}))}
    return _weights_digest(model_dir, subset, is_tower_tensor, full=full)


def language_model_digest(model_dir: Path, *, full: bool = False) -> bytes:
    """SHA-256 of everything but the vision tower; empty when there is none. Raises ValueError."""
    config = read_json(model_dir / "config.json")
    subset = _stable({k: v for k, v in config.items() if k != "vision_config"})
    return _weights_digest(model_dir, subset, lambda name: not is_tower_tensor(name), full=full)


def processor_digest(model_dir: Path) -> bytes:
    """SHA-256 of how media become pixels: the processor files and this build's pixel version."""
    names = ("preprocessor_config.json", "video_preprocessor_config.json")
    files = {n: read_json(model_dir / n) for n in names if (model_dir / n).exists()}
    return hashlib.sha256(canonical_json([_PIXELS_VERSION, files])).digest()


def tokenizer_digest(model_dir: Path) -> bytes:
    """SHA-256 of the tokenizer and its chat template."""
    digest = hashlib.sha256()
    paths = [model_dir / name for name in _TOKENIZER]
    paths += [path for path in tokenizer_files(model_dir) if path not in paths]
    for path in paths:
        data = path.read_bytes() if path.exists() else b""
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


def _weights_digest(
    model_dir: Path, config: dict[str, Any], belongs: Callable[[str], bool], *, full: bool
) -> bytes:
    tensors = sorted(_tensors(model_dir, belongs), key=lambda found: found[1].name)
    if not tensors:
        return b""
    digest = hashlib.sha256(canonical_json(config))
    if revision := _HUB_SNAPSHOT.search(model_dir.resolve().as_posix()):
        digest.update(revision.group(1).encode())
    handles: dict[Path, BinaryIO] = {}
    try:
        for path, tensor in tensors:
            digest.update(canonical_json([tensor.name, tensor.dtype, tensor.shape]))
            handle = handles.get(path) or handles.setdefault(path, path.open("rb"))
            for begin, size in _pieces(tensor, full=full):
                handle.seek(begin)
                digest.update(handle.read(size))
    finally:
        for handle in handles.values():
            handle.close()
    return digest.digest()


def _pieces(tensor: TensorEntry, *, full: bool) -> Iterator[tuple[int, int]]:
    size = tensor.end - tensor.begin
    if full or size <= _PIECES * _PIECE_BYTES:
        step = 1 << 24
        for begin in range(tensor.begin, tensor.end, step):
            yield begin, min(step, tensor.end - begin)
        return
    for index in range(_PIECES):
        yield tensor.begin + index * (size - _PIECE_BYTES) // (_PIECES - 1), _PIECE_BYTES


def _tensors(model_dir: Path, belongs: Callable[[str], bool]) -> Iterator[tuple[Path, TensorEntry]]:
    for path in weight_files(model_dir, wanted=belongs):
        yield from ((path, entry) for entry in read_header(path) if belongs(entry.name))


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in _VOLATILE}
    return value
