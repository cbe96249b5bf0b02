"""vLLM's own OpenAI server as a child process, with the plugin on, and proof that it evicts before anybody uses it.

Knows a command line and HTTP; imports no vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch

from kvkeep.serving.settings import EXTENSION, KEY, MISTAKE, Settings

GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")
POLL_SECONDS = 0.5


def command(model: str, name: str, settings: Settings, host: str, port: int, extra: Sequence[str] = ()) -> list[str]:
    """The command line of vLLM's server.

    Args:
        model: folder or hub id.
        name: what clients call it.
        settings: of kvkeep.
        host, port: where it listens.
        extra: further flags of vLLM, as a user would write them.
    """
    here = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    here += ["--model", model, "--served-model-name", name, "--host", host, "--port", str(port)]
    here += ["--additional-config", json.dumps({KEY: settings.to_json()})]
    here += ["--no-enable-prefix-caching", "--worker-extension-cls", EXTENSION]
    if torch.cuda.is_available():
        here += ["--attention-backend", "CUSTOM"]
    elif "--enforce-eager" not in extra:
        here += ["--enforce-eager"]  # compiling for a CPU takes minutes and gains little
    return [*here, *extra]


def environment() -> dict[str, str]:
    """That of this process, with kvkeep among the plugins; those that vLLM would load anyway stay."""
    names = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name]
    if not names:
        names = [point.name for group in GROUPS for point in entry_points(group=group)]
    return os.environ | {"VLLM_PLUGINS": ",".join(dict.fromkeys([*names, KEY]))}


class Server:
    """A running server.

    Args:
        arguments: from :func:`command`.
        url: where it listens, ``http://host:port``.
        key: that clients must show, if any.
        echo: called with every line that it prints.
    """

    def __init__(self, arguments: list[str], url: str, key: str | None = None, echo: Callable[[str], None] = print):
        self.url, self.key, self.echo = url, key, echo
        self.reason: str | None = None  # the last sentence it refused with
        self.process = subprocess.Popen(
            arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if MISTAKE in line:
                self.reason = line.split(MISTAKE, 1)[1].strip()
            self.echo(line.rstrip("\n"))

    def wait_until_healthy(self, seconds: float) -> None:
        """Wait for it to listen.

        Raises:
            ValueError: with its own sentence where it refused to start.
            TimeoutError: where it took longer.
            RuntimeError: where it stopped for another reason.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                self.reader.join(5)
                if self.reason:
                    raise ValueError(self.reason)
                raise RuntimeError(f"the server stopped with code {self.process.returncode} before it was ready")
            try:
                self.get("/health", parse=False)
            except (urllib.error.URLError, ConnectionError):
                time.sleep(POLL_SECONDS)
                continue
            return
        raise TimeoutError(f"the server was not ready after {seconds:.0f} s")

    def prove_eviction(self) -> dict[str, Any]:
        """Send one prompt longer than the budget and ask the workers what they did with it.

        Returns:
            the workers' report, see :class:`kvkeep.serving.vllm.report.Reporting`.

        Raises:
            RuntimeError: where nothing was evicted: the plugin is not at work.
        """
        before = self.report()
        model = self.get("/v1/models")["data"][0]
        length = min(before["budget"]["slots"] + 16, model["max_model_len"] - 1)
        self.post("/v1/completions", {"model": model["id"], "prompt": [1] * length, "max_tokens": 1})
        report = self.report()
        if report["evicted"] <= before["evicted"] or report["running"] < report["layers"]:
            raise RuntimeError(f"kvkeep is loaded and did not evict from a prompt of {length} tokens: {report}")
        return report | {"longest": model["max_model_len"]}

    def report(self) -> dict[str, Any]:
        """What the workers say.

        Raises:
            RuntimeError: where kvkeep is not loaded.
        """
        try:
            report = self.get("/kvkeep")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the server runs without kvkeep ({error}): it would keep every token") from error
        if not report["layers"]:
            raise RuntimeError("the server runs and no layer evicts: it would keep every token")
        return report

    def get(self, path: str, parse: bool = True) -> Any:
        return self._ask(urllib.request.Request(self.url + path), parse)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}), True)

    def _ask(self, request: urllib.request.Request, parse: bool) -> Any:
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        with urllib.request.urlopen(request, timeout=600) as answer:
            text = answer.read()
        return json.loads(text) if parse else text.decode()

    def stop(self, seconds: float = 20) -> int:
        """Have it end, by force where it does not within so many seconds; returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def concurrency(report: dict[str, Any]) -> tuple[float, float]:
    """Requests of the longest sequence that fit at once, under the budget and with a full cache in the same memory.

    The first counts a page of every layer a request, all that the policy keeps included; one block is vLLM's own.
    """
    usable = report["blocks"] - 1
    return float(usable), usable * report["page"] / (report["token"] * report["longest"])
