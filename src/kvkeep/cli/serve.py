"""`kvkeep serve`: an OpenAI endpoint whose memory per request is bounded."""

from __future__ import annotations

import importlib.util
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoConfig

from kvkeep.cli import common
from kvkeep.runtime import models
from kvkeep.serving.server import Server, command, concurrency
from kvkeep.serving.settings import Settings

READY_SECONDS = 1800  # a large model takes long to load
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}


class EngineName(StrEnum):
    """What runs the model."""

    vllm = "vllm"
    transformers = "transformers"


EngineFlag = Annotated[EngineName, typer.Option("--engine", help="vllm; or transformers, for one user on a laptop.")]
HostFlag = Annotated[str, typer.Option("--host", help="Address to listen at.")]
PortFlag = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen at.")]
NameFlag = Annotated[str | None, typer.Option("--served-model-name", help="What clients call it; --model by default.")]


def run(
    context: typer.Context,
    model: common.ModelFlag = common.DEFAULT_MODEL,
    policy: common.PolicyFlag = common.DEFAULT_POLICY,
    budget: common.BudgetFlag = common.DEFAULT_BUDGET,
    sinks: common.SinksFlag = None,
    window: common.WindowFlag = None,
    interval: common.IntervalFlag = None,
    budget_at_rest: common.AtRestFlag = False,
    scorer: common.ScorerFlag = None,
    prefill: common.PrefillFlag = common.Prefill.sparse,
    dtype: common.DtypeFlag = None,
    seed: common.SeedFlag = 0,
    engine: EngineFlag = EngineName.vllm,
    host: HostFlag = "127.0.0.1",
    port: PortFlag = 8000,
    served_model_name: NameFlag = None,
) -> None:
    """Serve a model under a budget.

    Flags of vLLM follow after --, like: kvkeep serve --policy kvpop_mlp --budget 512 -- --tensor-parallel-size 2
    """
    settings = Settings(
        policy, budget, sinks, window, interval, budget_at_rest, None if scorer is None else str(scorer), seed
    )
    common.generating_policy(policy, budget, sinks, window, interval, budget_at_rest, scorer, seed)
    name = served_model_name or model
    if engine == EngineName.transformers:
        if context.args:
            raise ValueError(f"--engine transformers takes no flags of vLLM, and was given {' '.join(context.args)}")
        serve_alone(settings, model, name, prefill, dtype, host, port)
    else:
        if prefill != common.Prefill.sparse:
            raise ValueError("--engine vllm reads prompts as token by token decoding would: --prefill sparse")
        if not port:
            raise ValueError("--port 0, a free port, is for --engine transformers: vllm is given one")
        serve_vllm(settings, model, name, dtype, host, port, context.args)


def serve_alone(settings: Settings, model: str, name: str, prefill, dtype, host: str, port: int) -> None:
    """In this process, a request at a time."""
    from kvkeep.serving import single

    language_model, tokenizer = common.load(model, dtype)
    chosen = common.equipped(settings.contender(_scorer(settings)), language_model)
    served = single.Model(language_model, tokenizer, chosen.policy(settings.budget), name, prefill.value)
    with single.serve(served, host, port) as server:
        print(f"ready: http://{host}:{server.server_address[1]}/v1, model {name}, one request at a time", flush=True)
        server.serve_forever()


def _scorer(settings: Settings) -> Any:
    import kvkeep

    return None if settings.scorer is None else kvkeep.load_scorer(settings.scorer)


def serve_vllm(settings: Settings, model: str, name: str, dtype, host: str, port: int, extra: list[str]) -> None:
    """vLLM's own server as a child, until it or the user ends it.

    Raises:
        ValueError: where vLLM is not installed, or what was asked for cannot work.
        RuntimeError: where the server came up and does not evict; it is stopped first.
    """
    require_vllm()
    where = models.resolve(model)
    require_settings(settings, where)
    flags = [] if dtype is None else ["--dtype", dtype.value]
    key = extra[extra.index("--api-key") + 1] if "--api-key" in extra[:-1] else None
    arguments = command(str(where), name, settings, host, port, [*flags, *extra])
    server = Server(arguments, f"http://{reachable(host)}:{port}", key, lambda line: print(line, file=sys.stderr))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the child must not outlive this
    try:
        server.wait_until_healthy(READY_SECONDS)
        bounded, full = concurrency(report := server.prove_eviction())
        print(
            f"ready: http://{host}:{port}/v1, model {name}\n"
            f"{settings.policy} holds {report['budget']['slots']} tokens per KV head in {report['layers']} layers; "
            f"{report['evicted']} were evicted from a first prompt\n"
            f"in this memory {bounded:.0f} requests run at once; with a full cache {full:.1f} of "
            f"{report['longest']} tokens would",
            flush=True,
        )
        code = server.process.wait()
        raise typer.Exit(code)
    finally:
        server.stop()


def require_vllm() -> None:
    """Raise ValueError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed here: put kvkeep[vllm] into an environment of its own, or use --engine transformers"
        )


def require_settings(settings: Settings, where: str | Path) -> None:
    """Find a user's mistake before vLLM is started; a model that is only on the hub is left to vLLM."""
    if Path(where).is_dir():
        config = AutoConfig.from_pretrained(where)
        settings.make(settings.scorer_for(config, where)).require_fits(config)


def reachable(host: str) -> str:
    """Where a server that listens at ``host`` is reached from this machine."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
