"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011), vectorised.

A draw depends on (seed, choice, position) alone: neighbours in the batch, preemption and replay on
another decoder leave it as it was.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = npt.NDArray[np.uint64]


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, ...]:
    """Four 32-bit words, held in uint64 arrays, per counter (four words) and key (two words)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: list[int], choices: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, of 53 random bits."""
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    choice = np.array(choices, dtype=np.uint64)
    zero = np.zeros_like(seed)
    words = philox((position, choice, zero, zero), (seed & _LOW, seed >> _32))
    return ((words[0] << _32 | words[1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
