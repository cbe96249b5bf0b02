"""Peak memory of one row alone: a process of its own that does nothing else.

On the CPU it is the largest resident set (the interpreter, torch and the weights included), on CUDA the most that torch
had allocated there.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")


def alone(work: Callable[..., object], device: torch.device, *given) -> int:
    """Peak bytes of ``work(*given, device)`` in a fresh process with one thread.

    Raises:
        Whatever the work raises.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_measured, work, str(device), given).result()


def _measured(work: Callable[..., object], device: str, given: tuple) -> int:
    torch.set_num_threads(1)
    work(*given, device)
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else resident_peak()


def resident_peak() -> int:
    """The largest resident set of this process so far, in bytes.

    ``VmHWM`` where there is one: on Linux ``getrusage`` also remembers the process that this one was forked from.
    """
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if MEMORY.exists():
        line = next(line for line in MEMORY.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(needed: int, device: torch.device, what: str) -> None:
    """Raise ValueError, naming both numbers, where ``needed`` bytes are more than can be had."""
    free = free_memory(device)
    if needed > free:
        raise ValueError(
            f"{what} needs {needed / 1e9:.1f} GB at once and {free / 1e9:.1f} GB are free: take shorter lengths, "
            "smaller batches or fewer policies"
        )
