"""``python -m kvkeep.kernels.check``: kernels for GPUs against their references, on the GPU that is there.

Every case compares the numbers, then times both in turns: ``ratio`` is the reference's median over the kernel's. Exit
code 0 where all agree, 1 where one does not, 2 without a GPU or Triton. The interpreter, in which the tests run the
same kernels on a CPU, shows neither what a compiler makes of them nor how fast they are.

Decoding is compared with attention in float64, of the same inputs; replacement and running top-k must be equal; labels
are compared with row blocks in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.attention_mass import future_attention
from kvkeep.budget import Budget
from kvkeep.kernels.choice import has_triton
from kvkeep.kernels.decode import decode_attention_reference
from kvkeep.kernels.place import replace_lowest_reference
from kvkeep.lifetimes import running_topk

LEAST_TURNS = 5  # below which a median says little
OUTPUT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # over the largest output
PROBABILITY_ERROR = 1e-5
LABEL_ERROR = 1e-3  # of a log target


class Case(NamedTuple):
    """A kernel and its reference on the same inputs."""

    what: str
    dtype: torch.dtype
    shape: str
    kernel: Callable[[], object]
    reference: Callable[[], object]
    error: Callable[[], float]
    allowed: float


class Found(NamedTuple):
    """What became of a case; milliseconds are (best, median), None where it was not timed."""

    case: Case
    error: float
    kernel: tuple[float, float] | None
    reference: tuple[float, float] | None

    @property
    def agrees(self) -> bool:
        return self.error <= self.case.allowed  # not so of NaN


def decode_case(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], masked: bool = False, statistics: bool = True
) -> Case:
    """Attention of one query; shape is batch, KV heads, group, slots, head_dim."""
    from kvkeep.kernels.triton_decode import decode_attention_triton

    batch, heads, group, slots, size = shape
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    query = draw(batch, heads, group, size).to(dtype)
    key, value = (draw(batch, heads, slots, size).to(dtype) for _ in range(2))
    live = None
    if masked:  # rows that hold different numbers, right-aligned as slots are
        first = torch.arange(batch, device=device) * slots // (batch + 1)
        live = (torch.arange(slots, device=device) >= first[:, None])[:, None]
    given = query, key, value, size**-0.5, live, statistics

    def error() -> float:
        output, probabilities = decode_attention_triton(*given)
        wide, exact = decode_attention_reference(query.double(), key.double(), value.double(), *given[3:])
        worst = _largest(output - wide) / float(wide.abs().max()) / OUTPUT_ERROR[dtype]
        return max(worst, _largest(probabilities - exact) / PROBABILITY_ERROR) if statistics else worst

    return Case(
        "decode" if statistics else "decode, output only",
        dtype,
        _named(batch=batch, heads=heads, group=group, slots=slots, dim=size) + (", padded" if masked else ""),
        partial(decode_attention_triton, *given),
        partial(decode_attention_reference, *given),
        error,
        1.0,  # of what is allowed to outputs and to probabilities
    )


def replace_case(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], steps: int = 20) -> Case:
    """Replacement in full slots, many priorities equal; shape is batch, KV heads, slots, head_dim."""
    from kvkeep.kernels.triton_place import replace_lowest_triton

    batch, heads, slots, size = shape
    sinks, window = min(4, slots // 4), max(1, slots // 8)
    generator = torch.Generator(device).manual_seed(0)
    new = [torch.randn(batch, 1, heads, size, generator=generator, device=device).to(dtype) for _ in range(2)]
    new = [pair.transpose(1, 2) for pair in new]  # as a model has them: heads are not the outer axis
    priority = torch.randint(9, (batch, heads, slots), generator=generator, device=device).float()

    def store() -> list[Tensor]:
        zeros = partial(torch.zeros, device=device)
        return [
            *(zeros(batch, heads, slots, size, dtype=dtype) for _ in range(2)),
            torch.arange(slots, device=device, dtype=torch.int32).flip(0).repeat(batch, heads, 1),
            priority.clone(),
            zeros(batch, heads, window, dtype=torch.int64),
            torch.full((batch,), slots, device=device) - torch.arange(batch, device=device) % slots,
        ]

    def error() -> float:
        mine, its = store(), store()
        for _ in range(steps):
            replace_lowest_triton(*mine, *new, sinks, window)
            replace_lowest_reference(*its, *new, sinks, window)
        return float(sum(int((a != b).sum()) for a, b in zip(mine, its, strict=True)))

    return Case(
        "replace",
        dtype,
        _named(batch=batch, heads=heads, slots=slots, dim=size),
        partial(replace_lowest_triton, *store(), *new, sinks, window),
        partial(replace_lowest_reference, *store(), *new, sinks, window),
        error,
        0.0,
    )


def label_case(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], way: dict[str, str]) -> Case:
    """KVpop's target; shape is KV heads, group, length, head_dim; ``way`` the options that are put to the test."""
    heads, group, length, size = shape
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    query, key = draw(1, heads * group, length, size).to(dtype), draw(1, heads, length, size).to(dtype)
    target = partial(future_attention, query, key, min(128, length // 2))
    plain = partial(target, backend="rows", precision="wide")
    return Case(
        "labels, " + ", ".join(way.values()),
        dtype,
        _named(heads=heads, group=group, length=length, dim=size),
        partial(target, **way),
        plain,
        lambda: _largest(target(**way) - plain()),
        LABEL_ERROR,
    )


def topk_case(device: torch.device, rows: int, length: int, levels: int) -> Case:
    """Running top-k, sorted on the device against the heap on the CPU; few levels make many priorities equal."""
    generator = torch.Generator().manual_seed(0)
    priority = torch.randint(levels, (1, rows, length), generator=generator).float()
    budget = Budget(sinks=4, window=length // 16, topk=length // 8)
    there = priority.to(device)
    kernel = partial(running_topk, there, budget, backend="torch")
    heap = partial(running_topk, priority, budget, backend="numba")
    return Case(
        "running top-k",
        torch.float32,
        _named(rows=rows, length=length, levels=levels),
        kernel,
        heap,
        lambda: float((kernel().cpu() != heap()).sum()),
        0.0,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """All of them, one at a time; the odd sizes are there for their edges."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for shape in ((1, 1, 1, 1, 64), (2, 3, 3, 77, 20), (3, 2, 7, 1000, 80), (1, 4, 2, 333, 256)):
            yield decode_case(device, dtype, shape)
            yield decode_case(device, dtype, shape, masked=True)
    for batch, slots in ((1, 512), (1, 4096), (1, 32768), (8, 512), (8, 4096), (64, 512)):
        yield decode_case(device, torch.bfloat16, (batch, 8, 4, slots, 128))
        yield decode_case(device, torch.bfloat16, (batch, 8, 4, slots, 128), masked=batch > 1, statistics=False)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1, 1, 3, 5), (2, 3, 77, 20), (1, 8, 512, 128), (1, 8, 4096, 128), (8, 8, 4096, 128)):
            yield replace_case(device, dtype, shape)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((2, 3, 500, 64), (8, 4, 4096, 128), (8, 4, 16384, 128)):
            yield label_case(device, dtype, shape, {"backend": "flex"})
    yield label_case(device, torch.bfloat16, (8, 4, 4096, 128), {"backend": "rows", "precision": "bfloat16"})
    yield topk_case(device, 24, 1000, 5)
    yield topk_case(device, 288, 16384, 10**6)


def check(given: Iterable[Case], turns: int) -> Iterator[Found]:
    """Compare, and with ``turns`` above 0 time, one case after the other."""
    for case in given:
        error = case.error()
        kernel, reference = _in_turns((case.kernel, case.reference), turns) if turns else (None, None)
        yield Found(case, error, kernel, reference)


def line(found: Found) -> str:
    """A row of the table under :data:`HEADER`."""
    case, times = found.case, "" if found.kernel is None else _times(found.kernel, found.reference)
    number = str(case.dtype).removeprefix("torch.")
    verdict = "agrees" if found.agrees else "DIFFERS"
    return f"{case.what:<24}{number:<10}{case.shape:<50}{found.error:>9.2g} of {case.allowed:<7.2g}{times:<47}{verdict}"


HEADER = (
    f"{'':<24}{'dtype':<10}{'shape':<50}{'error':>9} of {'most':<7}"
    f"{'reference ms':>16}{'kernel ms':>18}{'ratio':>8}     \n"
    f"{'':<103}{'best / median':>16}{'best / median':>18}"
)


def _times(kernel: tuple[float, float], reference: tuple[float, float]) -> str:
    numbers = [f"{best:.3f} / {median:.3f}" for best, median in (reference, kernel)]
    return f"{numbers[0]:>16}{numbers[1]:>18}{reference[1] / kernel[1]:>8.2f}"


def _in_turns(jobs: Sequence[Callable[[], object]], turns: int) -> list[tuple[float, float]]:
    """(Best, median) milliseconds of every job, medians of many calls in every turn, every second turn backwards."""
    from triton.testing import do_bench

    taken: list[list[float]] = [[] for _ in jobs]
    for turn in range(turns):
        for index in range(len(jobs)) if turn % 2 == 0 else reversed(range(len(jobs))):
            taken[index].append(do_bench(jobs[index], warmup=5, rep=20, return_mode="median"))
    return [(min(times), statistics.median(times)) for times in taken]


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def _named(**sizes: int) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def main(given: Sequence[str] | None = None) -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvkeep.kernels.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=LEAST_TURNS, help="in which both are timed")
    turns = parser.parse_args(given).turns
    problem = None
    if turns < LEAST_TURNS:
        problem = f"a median of {turns} turns says little: take at least {LEAST_TURNS}"
    elif not torch.cuda.is_available():
        problem = f"kernels are checked on a GPU, and torch {torch.__version__} sees none"
    elif not has_triton():
        problem = "kernels are written in Triton, which is not installed: pip install triton"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}\n{HEADER}")
    wrong = 0
    for found in check(cases(device), turns):
        print(line(found), flush=True)
        wrong += not found.agrees
    print("all agree" if not wrong else f"{wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
