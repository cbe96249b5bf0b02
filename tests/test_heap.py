"""Freed memory that stays: counted in pages that the kernel hands out, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvkeep.runtime.heap import keep_freed_memory

PROGRAM = """
import resource, sys, torch
from kvkeep.runtime.heap import keep_freed_memory
kept = sys.argv[1] == "keep" and keep_freed_memory({})
for turn in range(12):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)  # freed at once; above 32 MiB no block is kept by itself
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(what):
    run = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, check=True)
    kept, count = run.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_pages_are_handed_out_once():
    kept, few = faults("keep")
    if not kept:
        pytest.skip("the C library is not glibc")
    _, many = faults("leave")
    assert many > 10 * max(few, 10)


@pytest.mark.parametrize("name", ["MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"])
def test_a_users_own_setting_stays(name):
    assert not keep_freed_memory({name: "65536"})
