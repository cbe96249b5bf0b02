"""Freed memory kept for the next operation.

glibc hands a large block back to the kernel when it is freed, and the kernel clears every page when it is asked for
again. A forward on the CPU frees and asks for the same megabytes at every operation, and may spend as long in the
kernel as in arithmetic.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt(3)
NEVER = 2**31 - 1  # bytes at the top of the heap: 2 GiB are all that the argument holds


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let the process hold on to what it frees, from now on; for work that runs for minutes, not for what is measured
    by its peak.

    Args:
        environment: where a user's own setting of ``MALLOC_MMAP_MAX_`` or ``MALLOC_TRIM_THRESHOLD_`` is respected.

    Returns:
        Whether that is so: False where the C library is not glibc, or the user has decided.
    """
    if {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} & set(environment):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - other C libraries have no such symbol
    except (AttributeError, OSError, TypeError):
        return False
    return bool(library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, NEVER))
