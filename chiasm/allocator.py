"""glibc's allocator, told to keep what is freed.

By default it returns large blocks to the kernel as soon as they are freed. A forward on a CPU frees
and allocates its tensors over and over; every page of them is then zeroed and mapped anew, which
can take longer than the arithmetic.
"""

from __future__ import annotations

import ctypes

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_KEPT = 32 << 20  # of one block; more is refused
_MOST_KEPT = 256 << 20  # free at the top of an arena


def keep_freed_memory() -> bool:
    """From now on, this process keeps freed memory for itself, within bounds.

    Returns:
        Whether the C library knows how; others than glibc are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
    return bool(kept)
