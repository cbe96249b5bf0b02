"""What vLLM's API server shows of kvkeep: ``GET /kvkeep``, and lines of its own under ``/metrics``.

Both come from the workers, asked at that moment; there is nothing to see unless they evict. vLLM loads this where
``VLLM_PLUGINS`` names kvkeep, as `kvkeep serve` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.v1.engine.exceptions import EngineDeadError

from kvkeep.serving.settings import EXTENSION, KEY


class Endpoint:
    """An endpoint plugin of vLLM, which makes one for its server."""

    name = "kvkeep"
    required_tasks = None

    def __init__(self) -> None:
        self.engine = None
        self.report: dict[str, Any] = {"layers": 0}

    def attach_router(self, app: FastAPI) -> None:
        app.get("/kvkeep")(self.show)
        app.add_middleware(Asking, endpoint=self)

    async def init_state(self, engine_client, state, args) -> None:
        """Called before the server listens.

        Raises:
            RuntimeError: where kvkeep is asked for and no layer of the model is under it: the server must not run.
        """
        config = None if engine_client is None else engine_client.vllm_config
        if config is None or not isinstance(config.additional_config, dict) or KEY not in config.additional_config:
            return
        if config.parallel_config.worker_extension_cls != EXTENSION:
            raise RuntimeError(
                f"start the server with --worker-extension-cls {EXTENSION}: nothing else shows evictions"
            )
        self.engine = engine_client
        await self.ask()
        if not self.report["layers"]:
            raise RuntimeError("kvkeep is asked for and no layer of this model evicts: the server would run dense")
        REGISTRY.register(self)

    async def ask(self) -> None:
        """Have the first worker report; all do the same."""
        self.report = (await self.engine.collective_rpc("kvkeep_report"))[0]

    async def show(self) -> dict[str, Any]:
        """Policy, budget, layers, and counts since the start."""
        if self.engine is not None:
            await self.ask()
        return self.report

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        report = self.report
        policy = [report["policy"]]
        evicted = CounterMetricFamily("kvkeep_evicted_tokens", "Tokens evicted from every KV head.", labels=["policy"])
        evicted.add_metric(policy, report["evicted"])
        taken = CounterMetricFamily("kvkeep_tokens", "Tokens taken into the cache.", labels=["policy"])
        taken.add_metric(policy, report["tokens"])
        yield from (evicted, taken)
        gauges = {
            "kvkeep_budget_tokens": ("Tokens a KV head may hold of a request.", report["budget"]["slots"]),
            "kvkeep_held_tokens": ("Tokens a KV head holds of the requests of the latest step.", report["holding"]),
            "kvkeep_requests": ("Requests of the latest step.", report["requests"]),
            "kvkeep_occupancy": (
                "Share of the budgets of the latest step's requests that is taken.",
                report["holding"] / max(report["requests"] * report["budget"]["slots"], 1),
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["policy"])
            gauge.add_metric(policy, value)
            yield gauge

    def describe(self) -> list[Metric]:
        return []  # so that nothing is collected before there is a report


class Asking:
    """Has the workers report before the metrics are read; all other requests pass untouched."""

    def __init__(self, app: ASGIApp, endpoint: Endpoint):
        self.app, self.endpoint = app, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/metrics" and self.endpoint.engine is not None:
            with contextlib.suppress(EngineDeadError):  # its last numbers then; vLLM's health check tells of its death
                await self.endpoint.ask()
        await self.app(scope, receive, send)
