"""How everything here is timed: in turns, in one process, so that a busy machine slows all rows alike.

A measured call is a :class:`Job`. Every turn runs each job once, the next turn in the opposite order. On the CPU with
one thread the clock is that of the thread's own processor time: on an idle machine it shows what a wall clock does, and
what others do with the processor meanwhile is not counted. Rows of the result all have the same :data:`FIELDS`. Knows
clocks and devices, nothing of models.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch

FIELDS = (
    *("what", "policy", "part", "budget", "context", "batch", "dtype", "ms_best", "ms_median", "ratio"),
    *("tokens_per_second", "floor_ms", "kv_bytes", "side_bytes", "peak_rss"),
    *("reference_ms", "reference_ms_best", "grown_bytes"),
)
"""Of every row; null where it means nothing. :mod:`kvkeep.benchmark.report` and docs/speed.md say what they are."""

WARM_UP = 2  # turns that are not counted
LEAST = 5  # turns below which a median says little

Progress = Callable[[str, int, int], None]


@dataclass
class Job:
    """Something to time: ``call(*prepare())``, of which only the call is on the clock."""

    call: Callable[..., object]
    prepare: Callable[[], tuple] = tuple


def require_turns(repetitions: int) -> None:
    """Raise ValueError where so few say little."""
    if repetitions < LEAST:
        raise ValueError(f"a median of {repetitions} repetitions says little: take at least {LEAST}")


def in_turns(
    jobs: Sequence[Job],
    repetitions: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[float]]:
    """Milliseconds of every job in every turn, the first ``WARM_UP`` not counted.

    Args:
        jobs: run one after the other in every turn, in every second turn backwards.
        repetitions: turns that count.
        device: where the work is done.
        progress: called with (done, total) turns.

    Returns:
        ``repetitions`` numbers for each job.
    """
    _, clock = clock_of(device)
    taken: list[list[float]] = [[] for _ in jobs]
    total = repetitions + WARM_UP
    with torch.no_grad():
        for turn in range(total):
            order = range(len(jobs)) if turn % 2 == 0 else reversed(range(len(jobs)))
            for index in order:
                given = jobs[index].prepare()
                spent = clock(lambda job=jobs[index], given=given: job.call(*given))
                if turn >= WARM_UP:
                    taken[index].append(spent)
            if progress is not None:
                progress(turn + 1, total)
    return taken


Clock = Callable[[Callable[[], object]], float]


def clock_of(device: torch.device) -> tuple[str, Clock]:
    """(What is measured, milliseconds of a call) for work on a device with the threads that torch has."""
    if device.type == "cuda":
        return "CUDA events", _milliseconds_cuda
    if torch.get_num_threads() == 1:
        return "processor time of the thread", partial(_milliseconds, time.thread_time)
    return "wall clock", partial(_milliseconds, time.perf_counter)


def _milliseconds(now: Callable[[], float], call: Callable[[], object]) -> float:
    start = now()
    call()
    return 1000 * (now() - start)


def _milliseconds_cuda(call: Callable[[], object]) -> float:
    """Time between two events around one call in the current stream."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def row(what: str, policy: str, dtype: torch.dtype | str, times: Sequence[float] = (), **more: Any) -> dict[str, Any]:
    """A row of the result.

    Args:
        what: was measured.
        policy: or another name for who was.
        dtype: of keys and values.
        times: milliseconds, where it was timed.
        more: further ``FIELDS``.
    """
    found = dict.fromkeys(FIELDS) | {"what": what, "policy": policy, "dtype": str(dtype).removeprefix("torch.")}
    if len(times):
        found |= {"ms_best": digits(min(times)), "ms_median": digits(statistics.median(times))}
    unknown = set(more) - set(FIELDS)
    if unknown:
        raise TypeError(f"a row has no {', '.join(sorted(unknown))}")
    return found | more


def digits(value: float) -> float:
    """Rounded to what a clock can tell: four significant digits."""
    return float(f"{value:.4g}")


def settings(device: torch.device, **more: Any) -> dict[str, Any]:
    """Where and with what it was measured; the load average is that of the last minute, before and after."""
    found = {
        **more,
        "threads": torch.get_num_threads(),
        "clock": clock_of(device)[0],
        "device": str(device),
        "processor": processor(device),
        "load_average": load_average(),
        "load_average_after": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("transformers", "numba"):
        found[package] = metadata.version(package)
    return found


def load_average() -> float:
    return round(os.getloadavg()[0], 2)


def processor(device: torch.device) -> str:
    """The GPU, or the instructions that torch uses of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
