"""The gate of a SwiGLU block (Shazeer 2020) over the joined output of both its matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(
    gate_up_NF: Tensor, *, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """`silu(gate) * up`, computed in float32 on a GPU.

    Args:
        gate_up_NF: [N, 2F], gate in the first half of each row.
        bias: [2F], added first: free here, and some matrix products are faster without it.
        dtype: Of the result, and on a CPU of the arithmetic; the input's when None.

    Returns:
        [N, F].
    """
    dtype = dtype or gate_up_NF.dtype
    if gate_up_NF.is_cuda:
        from chiasm.kernels.activation_triton import launch_silu_and_mul

        return launch_silu_and_mul(gate_up_NF, bias, dtype=dtype)
    if bias is not None:
        gate_up_NF = gate_up_NF + bias
    gate, up = gate_up_NF.to(dtype).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
