"""`python -m decoder_svc.attention.prebuild`: compiles flashinfer's modules for an image.

They go where flashinfer looks first, into its own package, so that nothing is compiled and nothing
is written where the image runs. Needs nvcc and a C++ compiler, no GPU; FLASHINFER_CUDA_ARCH_LIST
says for which GPUs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
_ARCHES = "FLASHINFER_CUDA_ARCH_LIST"
_HOPPER = "9.0a"


def main(head_dims: Sequence[int] = HEAD_DIMS) -> None:
    """Builds what `FlashInferAttention` asks for: prompts over pages, per dtype and head size.

    Raises:
        ValueError: It is not said for which GPUs.
    """
    arches = os.environ.get(_ARCHES, "").split()
    if not arches:
        raise ValueError(f"set {_ARCHES}, such as '8.0 9.0a'")
    for spec in specs(arches, head_dims):
        if not spec.is_aot:
            spec.build(verbose=False)
            spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(spec.jit_library_path, spec.aot_path)
        print(f"{spec.name}: {spec.aot_path.stat().st_size >> 20} MiB", flush=True)


def specs(arches: Sequence[str], head_dims: Sequence[int]) -> list[Any]:
    """flashinfer's descriptions of the modules, as its wrapper of paged prompts names them."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    kinds = ["fa2"] * (set(arches) != {_HOPPER}) + ["fa3"] * (_HOPPER in arches)
    return [
        # No position encoding of its own, no window, no soft cap, no half-precision sums.
        gen_batch_prefill_module(
            kind, dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False, False
        )
        for kind in kinds
        for dtype in DTYPES
        for dim in head_dims
    ]


if __name__ == "__main__":
    try:
        main()
    except ValueError as problem:
        sys.exit(str(problem))
