"""The random numbers of Inductor's C++ kernels, in NumPy.

Uncompiled ``prims.inductor_random`` ignores its seed tensor. Eager segments compute what compiled ones compute instead: the
counter-based generator Philox4x32-10 (Salmon et al., SC'11), element i drawn with counter i and the 32 low bits of the seed
as key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SCALE = np.float32(4.6566127342e-10)


def inductor_seeds(count: int, device: torch.device) -> torch.Tensor:
    """``count`` fresh seeds from the device's default generator, drawn as compiled code draws them."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, [count], device=device)


def inductor_random(
    size: Sequence[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """float32 numbers of shape ``size``: uniform in [0, 1) for mode "rand", standard normal for "randn"."""
    first, second = _words(seed, math.prod(size))
    if mode == "rand":
        numbers = _uniform(first)
    else:
        u1, u2 = (np.float32(1) - _uniform(word) for word in (first, second))
        # The C++ kernels take the logarithm in single precision and all else in double precision.
        radius = np.sqrt(-2.0 * np.log(u1).astype(np.float64))
        numbers = (radius * np.cos(2.0 * np.pi * u2.astype(np.float64))).astype(np.float32)
    return torch.from_numpy(numbers).reshape(tuple(size)).to(seed.device)


def inductor_randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    """int64 numbers in [low, high) of shape ``size``."""
    first, second = _words(seed, math.prod(size))
    wide = first.astype(np.uint64) | second.astype(np.uint64) << np.uint64(32)
    numbers = (wide % np.uint64(high - low)).astype(np.int64) + low
    return torch.from_numpy(numbers).reshape(tuple(size)).to(seed.device)


def _uniform(word: np.ndarray) -> np.ndarray:
    return (word & np.uint32(0x7FFFFFFF)).astype(np.float32) * _SCALE


def _words(seed: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first two 32-bit outputs of Philox4x32-10 for counters 0 … count − 1."""
    keys = [int(seed.item()) & 0xFFFFFFFF, 0]
    zeros = np.zeros(count, dtype=np.uint64)
    counter = [np.arange(count, dtype=np.uint64), zeros, zeros, zeros]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            (b >> np.uint64(32)) ^ counter[1] ^ np.uint64(keys[0]),
            b & low,
            (a >> np.uint64(32)) ^ counter[3] ^ np.uint64(keys[1]),
            a & low,
        ]
        keys = [(k + w) & 0xFFFFFFFF for k, w in zip(keys, _WEYL, strict=True)]
    return counter[0].astype(np.uint32), counter[1].astype(np.uint32)
