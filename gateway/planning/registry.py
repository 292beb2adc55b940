"""model_type -> planner, imported only when a checkpoint asks for it."""

from __future__ import annotations

import importlib
from pathlib import Path

from chiasm.json_file import read_json
from gateway.planning.base import Planner

_PLANNERS = {
    "glm46v": "gateway.planning.glm4v:Glm4vPlanner",
    "glm4v": "gateway.planning.glm4v:Glm4vPlanner",
    "glm4v_moe": "gateway.planning.glm4v:Glm4vPlanner",
    "internvl": "gateway.planning.internvl:InternVLPlanner",
    "internvl_chat": "gateway.planning.internvl:InternVLPlanner",
    "qwen2_5_vl": "gateway.planning.qwen2_5_vl:Qwen25VLPlanner",
    "qwen2_vl": "gateway.planning.qwen2_5_vl:Qwen25VLPlanner",
    "qwen3_vl": "gateway.planning.qwen3_vl:Qwen3VLPlanner",
    "qwen3_vl_moe": "gateway.planning.qwen3_vl:Qwen3VLPlanner",
}


def planner_for(model_dir: Path) -> Planner:
    """The planner of a checkpoint, built from its processor files.

    Raises:
        ValueError: A family that is not supported; the message names those that are.
    """
    config = read_json(model_dir / "config.json")
    kind = config.get("model_type")
    if kind not in _PLANNERS:
        known = ", ".join(sorted(_PLANNERS))
        raise ValueError(f"{model_dir}: model_type {kind!r} is not supported; known: {known}")
    module, _, name = _PLANNERS[kind].partition(":")
    planner: Planner = getattr(importlib.import_module(module), name).from_files(
        image=read_json(model_dir / "preprocessor_config.json", optional=True),
        video=read_json(model_dir / "video_preprocessor_config.json", optional=True),
        config=config,
    )
    return planner
