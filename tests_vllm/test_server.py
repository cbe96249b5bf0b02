"""`kvkeep serve` on vLLM, asked by OpenAI's own client: what clients do, what they do wrong, and memory that stays."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest

from openai_checks import check_everything, client_for, get, metric

BUDGET, LONGEST, NAME = 96, 512, "small"
# so few blocks that a round of the soak has touched every one: memory is committed when it is written first
ENGINE = [
    "--num-gpu-blocks-override",
    "20",
    "--max-model-len",
    str(LONGEST),
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "256",
]
SOAK_ROUNDS, SOAK_REQUESTS = 4, 24


def interruptible():
    """A shell's background job ignores interrupts, and so would the server that is to be stopped by one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Served:
    """The command in a process of its own, its output, and where it listens."""

    def __init__(self, *flags, engine=(), environment=None):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.url, self.lines, self.ready = f"http://127.0.0.1:{port}", [], threading.Event()
        command = [sys.executable, "-m", "kvkeep.cli", "serve", "--port", str(port), *flags, "--", *ENGINE, *engine]
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the engine in a process of its own, as users have it
        self.process = subprocess.Popen(
            command,
            env=os.environ | own | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=interruptible,
        )
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("ready:"):
                self.ready.set()
        self.ready.set()  # or it never will be

    def wait(self):
        self.ready.wait(1800)
        assert any(line.startswith("ready:") for line in self.lines), "\n".join(self.lines[-60:])
        return self

    def memory(self):
        """Bytes resident in the server and its children."""
        tree = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in [tree, *tree.children(recursive=True)])

    def stop(self):
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(120)
        psutil.wait_procs(children, timeout=60)
        return code, [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def served(model_folder):
    flags = ["--model", model_folder, "--served-model-name", NAME, "--policy", "kvpop_mlp", "--budget", str(BUDGET)]
    running = Served(*flags, "--dtype", "float32")
    yield running.wait()
    code, left = running.stop()
    assert left == [], "processes outlived the server"
    assert code in (0, 130, -signal.SIGINT)


@pytest.fixture
def client(served):
    return client_for(served.url)


def test_clients_get_what_they_ask_for(served):
    check_everything(served.url, NAME, BUDGET, LONGEST)


def test_it_says_what_was_bought(served):
    """Printed when it is ready: budget, layers, evictions that have happened, and requests that fit."""
    said = " ".join(served.lines[next(i for i, line in enumerate(served.lines) if line.startswith("ready:")) :][:3])
    assert f"kvpop_mlp holds {BUDGET} tokens per KV head in 30 layers; 16 were evicted" in said
    assert "requests run at once; with a full cache" in said


def test_log_probabilities_are_those_of_the_text(client):
    answer = client.completions.create(model=NAME, prompt="One, two,", max_tokens=5, temperature=0, logprobs=2)
    told = answer.choices[0].logprobs
    assert "".join(told.tokens) == answer.choices[0].text
    assert len(told.token_logprobs) == 5
    for token, own, best in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert own == pytest.approx(max(best.values()), abs=1e-4)
        assert token in best


def test_several_answers_to_one_prompt(client):
    """Each in a block of its own: drawn from one token they are the same, drawn from all they differ.

    Without a seed: vLLM's worker on a CPU stops where a request that has one is read in pieces, which three may be.
    """
    asked = {"model": NAME, "prompt": "word " * (BUDGET + 30), "max_tokens": 10, "temperature": 1.0, "n": 3}
    texts = [choice.text for choice in client.completions.create(**asked, extra_body={"top_k": 1}).choices]
    assert len(texts) == 3
    assert len(set(texts)) == 1
    drawn = client.completions.create(**asked).choices
    assert len({choice.text for choice in drawn}) > 1


def test_requests_of_mixed_lengths_at_once_are_as_if_alone(client):
    """More than run at once, short and long, below and above the budget."""
    prompts = [
        [40 + (7 * i + j) % 300 for j in range(length)] for i, length in enumerate((3, 150, 20, 300, 96, 97) * 2)
    ]

    def ask(prompt):
        asked = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        return client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(ask, prompts))
    alone = [ask(prompt) for prompt in prompts]
    assert sum(one == other for one, other in zip(together, alone, strict=True)) >= len(prompts) - 1  # a near tie


def test_a_client_that_leaves_frees_its_block(served, client):
    stream = client.completions.create(model=NAME, prompt="Count:", max_tokens=400, stream=True, temperature=0)
    for _, _ in zip(range(3), stream, strict=False):
        pass
    assert metric(served.url, "vllm:num_requests_running") == 1
    stream.close()
    for _ in range(200):  # each look takes a step of the engine at most
        if metric(served.url, "vllm:num_requests_running") == 0:
            break
        client.completions.create(model=NAME, prompt="x", max_tokens=1)
    assert metric(served.url, "vllm:num_requests_running") == 0
    assert metric(served.url, "vllm:kv_cache_usage_perc") == 0


def test_a_soak_leaves_memory_as_it_was(served, client):
    """Rounds of mixed requests, a fifth of them abandoned or malformed; memory after the first round stays.

    The worker of a dense vLLM grows too in such rounds, less and less, by batches of shapes that it has not had before.
    Requests that did not let go of what they held would add more than twice the bound: 72 of about 4 MB.
    """
    chance = random.Random(0)

    def ask(number):
        length, tokens = chance.randrange(1, 220), chance.randrange(1, 40)
        asked = {"model": NAME, "prompt": [chance.randrange(5, 2000) for _ in range(length)], "max_tokens": tokens}
        if number % 10 == 0:
            stream = client.completions.create(**asked, stream=True)
            next(iter(stream), None)
            stream.close()
        elif number % 10 == 1:
            with pytest.raises(openai.BadRequestError):
                client.completions.create(**asked | {"max_tokens": 10_000})
        else:
            client.completions.create(**asked)

    memory = []
    for _ in range(SOAK_ROUNDS):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(SOAK_REQUESTS)))
        memory.append(served.memory())
    assert max(memory[1:]) - memory[0] < 128e6, [f"{size / 1e6:.0f} MB" for size in memory]
    assert metric(served.url, "kvkeep_evicted_tokens_total") > 0
    assert get(served.url, "/health") == ""


def test_a_server_without_the_plugin_is_not_called_ready(model_folder):
    """The plugin's entry point kept from vLLM, as if it had failed to load: the command ends instead of serving."""
    hidden = os.pathsep.join([os.path.join(os.path.dirname(__file__), "without_plugin")])
    running = Served(
        *["--model", model_folder, "--policy", "streaming", "--budget", str(BUDGET)],
        environment={"PYTHONPATH": hidden, "KVKEEP_HIDE_PLUGIN": "1"},
    )
    assert running.process.wait(1800) == 1
    assert not any(line.startswith("ready:") for line in running.lines)
    assert any("the server runs without kvkeep" in line for line in running.lines), running.lines[-20:]
