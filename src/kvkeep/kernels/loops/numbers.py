"""What every loop starts from: how it is compiled, and how numbers of half precision are read."""

from __future__ import annotations

import functools
import math

import numba
import numpy as np
from numba import types
from numba.extending import overload

loop = functools.partial(numba.njit, nogil=True, cache=True)


def is_finite(value):
    """Of a number, or of the bits of one."""


def widen(source, target):
    """Copy numbers, or the bits of numbers, into a vector of float32 or float64."""


@overload(is_finite)
def _is_finite(value):
    if isinstance(value, types.Float):
        return lambda value: math.isfinite(value)
    exponent = 0x7F80 if value == types.int16 else 0x7C00
    return lambda value: value & exponent != exponent


@overload(widen)
def _widen(source, target):
    if isinstance(source.dtype, types.Float):

        def copy(source, target):
            target[:] = source
    elif source.dtype == types.int16:

        def copy(source, target):
            bits = np.empty(source.size, np.int32)
            for i in range(source.size):
                bits[i] = np.int32(source[i]) << 16
            target[:] = bits.view(np.float32)
    else:

        def copy(source, target):
            for i in range(source.size):
                exponent, fraction = (source[i] >> 10) & 31, source[i] & 1023
                size = fraction * 2.0**-24 if exponent == 0 else (1024 + fraction) * 2.0 ** (int(exponent) - 25)
                target[i] = -size if source[i] >> 15 else size

    return copy


@loop
def all_finite(new):
    """Of new pairs ``[B, H, 1, D]``."""
    for row in range(new.shape[0]):
        for head in range(new.shape[1]):
            for i in range(new.shape[3]):
                if not is_finite(new[row, head, 0, i]):
                    return False
    return True
