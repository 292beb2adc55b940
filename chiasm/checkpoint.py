"""Turns `--model` into a directory of checkpoint files, and reads the JSON ones.

A name is, in this order: `demo`, a directory, a hub id in the local cache, a hub id that can be
downloaded. Reads no weights and imports no torch.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chiasm.json_file import read_json
from chiasm.tokenizer_file import added_token

DEMO = "demo"
WEIGHT_INDEX = "model.safetensors.index.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Everything a service reads beside weights: configs, tokenizer and template files.
_PLAIN = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = "*.safetensors"  # never pickles

Wanted = Callable[[str], bool]
"""By name, whether a tensor is read."""


def every_tensor(name: str) -> bool:
    """All weights are read."""
    return True


def no_tensor(name: str) -> bool:
    """No weights are read."""
    return False


def resolve_model(name_or_path: str, *, wanted: Wanted = every_tensor) -> Path:
    """The absolute directory that holds the checkpoint's config.json.

    Args:
        name_or_path: What --model says.
        wanted: Of a hub id, only files that hold such tensors are downloaded; each pod of a
            cluster fetches its own part.

    Raises:
        ValueError: It is neither `demo`, nor such a directory, nor a hub id that can be had.
    """
    if name_or_path == DEMO:
        return _checked(_demo_checkpoint(), name_or_path)
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return _checked(path.resolve(), name_or_path)
    if not _HUB_ID.fullmatch(name_or_path):
        raise ValueError(f"--model {name_or_path!r}: no such directory, and no hub id")
    return _checked(_from_hub(name_or_path, wanted), name_or_path)


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json, with what the layout of InternVL's authors calls or keeps otherwise put right.

    Raises:
        ValueError: No such file, or no JSON; or a placeholder that the tokenizer lacks.
    """
    config = read_json(model_dir / "config.json")
    if "llm_config" not in config:
        return config
    token_id = config.get("image_token_id") or added_token(model_dir, "<IMG_CONTEXT>")
    return {**config, "text_config": config["llm_config"], "image_token_id": token_id}


def weight_files(model_dir: Path, *, wanted: Wanted = every_tensor) -> tuple[Path, ...]:
    """The files that hold a checkpoint's tensors, each once, sorted.

    Those of the index where there is one: a directory may hold the same weights a second time, in
    one piece. All *.safetensors otherwise.

    Args:
        model_dir: The checkpoint.
        wanted: By name, the tensors that will be read: files of the index without any are left
            out, and need not be there.

    Raises:
        ValueError: A file is missing, or there is none, or the index is none.
    """
    index = model_dir / WEIGHT_INDEX
    if not index.exists():
        files = tuple(sorted(model_dir.glob("*.safetensors")))
        if not files:
            raise ValueError(f"no *.safetensors in {model_dir}")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ValueError(f"{index} has no weight_map of file names")
    files = tuple(sorted({model_dir / file for name, file in weight_map.items() if wanted(name)}))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{index} names {', '.join(missing)}, which is not there")
    return files


def _demo_checkpoint() -> Path:
    with importlib.resources.as_file(importlib.resources.files("chiasm.demo")) as package:
        return (package / "checkpoint").resolve()


def _checked(directory: Path, name: str) -> Path:
    if not (directory / "config.json").is_file():
        raise ValueError(f"--model {name!r}: {directory} holds no config.json")
    return directory


def _from_hub(hub_id: str, wanted: Wanted) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ValueError(
            f"--model {hub_id!r}: no such directory; install huggingface_hub to use hub ids"
        ) from error
    try:
        cached = Path(snapshot_download(hub_id, allow_patterns=_PLAIN, local_files_only=True))
        # Another service may have fetched another part, or may be at it.
        if not _missing(cached, wanted):
            return cached
    except LocalEntryNotFoundError:
        pass  # not cached yet
    try:
        found = Path(snapshot_download(hub_id, allow_patterns=_PLAIN))
        if files := _missing(found, wanted):
            found = Path(snapshot_download(hub_id, allow_patterns=files))
        return found
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"--model {hub_id!r}: cannot be downloaded: {reason}") from error


def _missing(directory: Path, wanted: Wanted) -> list[str]:
    """Patterns of the files that are read and are not there."""
    if not (directory / "config.json").is_file():
        return [*_PLAIN, _WEIGHTS]
    if wanted is no_tensor:
        return []
    if not (directory / WEIGHT_INDEX).exists():
        return [] if any(directory.glob(_WEIGHTS)) else [_WEIGHTS]
    weight_map = read_json(directory / WEIGHT_INDEX).get("weight_map") or {}
    files = {str(file) for name, file in weight_map.items() if wanted(name)}
    return sorted(file for file in files if not (directory / file).is_file())
