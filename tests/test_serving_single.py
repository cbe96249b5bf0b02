"""The laptop's server, asked by OpenAI's own client."""

from __future__ import annotations

import itertools
import threading

import openai
import pytest
import torch

import kvkeep
from kvkeep.runtime import models
from kvkeep.serving import single
from openai_checks import check_everything, client_for
from tiny import HANDED

PREFILL = "sparse" if HANDED else "dense"  # prompts above the budget need kvkeep's attention, transformers >= 5.24
LONGEST = 512


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A tiny model of bytes under streaming at 60 tokens, without an end of text."""
    import byte_model

    folder = tmp_path_factory.mktemp("served")
    byte_model.write(folder)
    model, tokenizer = models.load(str(folder), dtype="float32")
    model.config.max_position_embeddings = LONGEST
    model.generation_config.eos_token_id = None
    policy = kvkeep.policies.create("streaming", 60)
    with single.serve(single.Model(model, tokenizer, policy, "bytes", PREFILL), "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()


@pytest.fixture
def url(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_clients_get_what_they_ask_for(url):
    check_everything(url, "bytes", slots=60, longest=LONGEST)


@pytest.mark.parametrize("asked", [{"n": 2}, {"logprobs": 3}, {"echo": True}, {"stop": [1]}, {"stop": [""]}])
def test_what_it_cannot_do_it_says(url, asked):
    with pytest.raises(openai.BadRequestError):
        client_for(url).completions.create(model="bytes", prompt="Hello", max_tokens=3, **asked)


def test_a_seed_repeats_a_draw(url):
    asked = {"model": "bytes", "prompt": "Hello", "max_tokens": 20, "temperature": 1.0}
    client = client_for(url)
    texts = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_usage_tells_what_was_kept(url):
    usage = client_for(url).completions.create(model="bytes", prompt="x" * 100, max_tokens=8).usage
    assert usage.kvkeep == {"kept_tokens": 60, "evicted_tokens": 100 + 7 - 60}


def test_a_client_that_leaves_ends_its_generation(server, url):
    """Otherwise the next one would wait for hundreds of tokens that nobody reads.

    The model waits in its tenth step until the client has left, so that a fast model does not end before it.
    """
    before, begun, left, steps = server.model.tokens, threading.Event(), threading.Event(), itertools.count()

    def wait(*_) -> None:
        if next(steps) == 10:
            begun.set()
            left.wait(60)

    hook = server.model.model.register_forward_pre_hook(wait)
    try:
        stream = client_for(url).completions.create(model="bytes", prompt="Hello", max_tokens=400, stream=True)
        assert begun.wait(60)
        stream.close()
        left.set()
        client_for(url).completions.create(model="bytes", prompt="Hello", max_tokens=2)
    finally:
        left.set()
        hook.remove()
    assert server.model.tokens - before < 100


def test_text_that_may_become_a_stop_string_waits():
    class Letters:
        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    shown = []
    stops = single.Stops(Letters(), ("abc",), shown.append, lambda: False)
    for letter in "xabyab":
        stops.on_finalized_text(letter)
    assert "".join(shown) == "xaby"
    stops.on_finalized_text("c and more")
    assert ("".join(shown), stops.found) == ("xaby", True)
    assert bool(stops.criterion(torch.zeros(1, 1), None).all())
