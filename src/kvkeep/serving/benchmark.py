"""What a budget buys a server, dense against bounded in one run of one process, in vLLM's environment.

    python -m kvkeep.serving.benchmark --policies kvpop_mlp --budget 256 --requests 64 --tokens 1000 --memory 1024

Throughput: the same requests through each engine in the same KV memory, one after the other; how many ran at once, and
tokens per second. Overhead: all engines with the same batch, around the budget's length, taking turns step by step;
the time of a step beside the dense one's. Seconds are CPU seconds of one thread, which a busy machine stretches less
than the wall seconds beside them.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvkeep.evaluation.store import require_writable, write_atomic
from kvkeep.runtime.models import resolve
from kvkeep.serving.settings import KEY, Settings

DENSE = "dense"
WARM_UP = 12  # steps of the overhead that do not count
PROMPT = 32  # tokens before those that are written, in the throughput


def engine(model: str, policy: str, budget: int, memory: int, **options: Any) -> Any:
    """An engine of vLLM in this process; ``memory`` bytes of KV cache."""
    from vllm import LLM

    keep = {} if policy == DENSE else {"additional_config": {KEY: Settings(policy, budget).to_json()}}
    fixed = {"enforce_eager": True, "enable_prefix_caching": False, "kv_cache_memory_bytes": memory}
    return LLM(model=model, **fixed | keep | options).llm_engine


def add(llm: Any, count: int, prompt: int, tokens: int) -> None:
    """Requests of random prompts that write exactly ``tokens``."""
    from vllm import SamplingParams

    chance, vocabulary = random.Random(0), llm.model_config.get_vocab_size()
    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for index in range(count):
        ids = [chance.randrange(vocabulary // 2) for _ in range(prompt)]
        llm.add_request(f"{index}-{time.monotonic_ns()}", {"prompt_token_ids": ids}, parameters)


def throughput(llm: Any, requests: int, tokens: int) -> dict[str, Any]:
    """Run all requests to their end."""
    add(llm, requests, PROMPT, tokens)
    scheduler = llm.engine_core.engine_core.scheduler
    together, steps, cpu, wall = [], 0, time.process_time(), time.perf_counter()
    while llm.has_unfinished_requests():
        llm.step()
        steps += 1
        together.append(len(scheduler.running))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    written = requests * tokens
    return {
        "what": "throughput",
        "requests": requests,
        "tokens": tokens,
        "concurrent": max(together),
        "steps": steps,
        "cpu_s": cpu,
        "wall_s": wall,
        "tokens_per_cpu_s": written / cpu,
        "tokens_per_s": written / wall,
    }


def overhead(engines: dict[str, Any], batch: int, budget: int, steps: int) -> list[dict[str, Any]]:
    """Time steps of equal batches in turn; prompts end just below the budget, so that all but the dense evict."""
    for llm in engines.values():
        add(llm, batch, budget - 8, steps + WARM_UP + 8)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(steps + WARM_UP):
        for name, llm in engines.items():
            start = time.process_time()
            llm.step()
            times[name].append(1000 * (time.process_time() - start))
    for llm in engines.values():
        while llm.has_unfinished_requests():
            llm.step()
    rows = []
    for name, every in times.items():
        counted, dense = every[WARM_UP:], times[DENSE][WARM_UP:]
        ratio = statistics.median(mine / its for mine, its in zip(counted, dense, strict=True))
        row = {"what": "overhead", "policy": name, "batch": batch, "ratio": ratio}
        rows.append(row | {"ms_median": statistics.median(counted), "ms_mean": statistics.fmean(counted)})
    return rows


def measure(
    model: str, policies: list[str], budget: int, requests: int, tokens: int, memory: int, batch: int, **options: Any
) -> dict[str, Any]:
    """Both measurements of the dense engine and one per policy.

    Args:
        model: folder or hub id.
        policies: names.
        budget: tokens per KV head.
        requests, tokens: of the throughput; 0 requests leave it out.
        memory: bytes of KV cache that every engine gets.
        batch: of the overhead; 0 leaves it out.
        options: of vLLM.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines that can be stepped and timed here
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    longest = max(PROMPT + tokens, budget + 128) + 1
    common = {"max_model_len": longest, "max_num_seqs": max(requests, batch, 1)} | options
    engines = {name: engine(model, name, budget, memory, **common) for name in (DENSE, *policies)}
    rows = overhead(engines, batch, budget, 64) if batch else []
    for name, llm in engines.items():
        if requests:
            rows.append(throughput(llm, requests, tokens) | {"policy": name})
    settings = {"model": model, "budget": budget, "memory_bytes": memory, "longest": longest}
    return {"rows": rows, "settings": settings | {"load_average": os.getloadavg()[0]}}


def tables(result: dict[str, Any]) -> list[Table]:
    shown = []
    for what, columns in {
        "overhead": ("policy", "batch", "ms_median", "ms_mean", "ratio"),
        "throughput": ("policy", "requests", "tokens", "concurrent", "tokens_per_cpu_s", "tokens_per_s", "wall_s"),
    }.items():
        rows = [row for row in result["rows"] if row["what"] == what]
        if rows:
            table = Table(*columns, title=what)
            for row in rows:
                table.add_row(
                    *(f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in columns)
                )
            shown.append(table)
    return shown


def main(
    model: Annotated[str, typer.Option(help="An alias, a local folder or a hub id.")] = "smollm2-135m",
    policies: Annotated[str, typer.Option(help="Names, like streaming,kvpop_mlp.")] = "kvpop_mlp",
    budget: Annotated[int, typer.Option(min=1)] = 256,
    requests: Annotated[int, typer.Option(min=0, help="Of the throughput; 0 leaves it out.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="That each writes.")] = 1000,
    memory: Annotated[int, typer.Option(min=1, help="MiB of KV cache for every engine.")] = 1024,
    batch: Annotated[int, typer.Option(min=0, help="Of the overhead; 0 leaves it out.")] = 8,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    out: Annotated[Path | None, typer.Option("--json", help="Result.")] = None,
) -> None:
    """Measure what a budget buys and what it costs."""
    try:
        require_writable(out, "--json")
        names = policies.replace(",", " ").split()
        for name in names:
            Settings(name, budget)
        result = measure(str(resolve(model)), names, budget, requests, tokens, memory * 2**20, batch, dtype=dtype)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    if out is not None:
        write_atomic(out, json.dumps(result, indent=1) + "\n")
    for table in tables(result):
        Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
