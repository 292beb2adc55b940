"""Writes model.safetensors, rounded to bf16, in the hub's layout."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.demo_model.model import DemoModel

WEIGHTS_NAME = "model.safetensors"


def save_weights(model: DemoModel, directory: Path) -> None:
    """Write the rounded weights; the tied output matrix is not written."""
    tensors = {
        name: value.detach().cpu().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})
