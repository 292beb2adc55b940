"""Declares torchvision's operators where its compiled ones do not load beside the installed torch.

Test-only: transformers imports torchvision wherever it finds it, and torchvision fails at import
when its operators are missing. Call `declare` before the first import from transformers.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_libraries: list[torch.library.Library] = []  # a registry: an operator lives as long as its library


def declare() -> None:
    """Makes `import torchvision` work; does nothing where it works already, or on a second call."""
    spec = importlib.util.find_spec("torchvision")
    if _libraries or spec is None or not spec.submodule_search_locations:
        return
    package = Path(next(iter(spec.submodule_search_locations)))
    if _compiled_operators_load(package):
        return
    source = (package / "_meta_registrations.py").read_text()
    names = set(re.findall(r'register_(?:meta|fake|kernel)\("(?:torchvision::)?(\w+)"', source))
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(names | {"nms", "qnms"}):
        library.define(f"{name}(Tensor x) -> Tensor")
    _libraries.append(library)


def _compiled_operators_load(package: Path) -> bool:
    compiled = next(iter(package.glob("_C*.so")), None)
    if compiled is None:
        return False
    try:
        torch.ops.load_library(str(compiled))
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
