"""A decode step under torch.compile: one graph without a break, never compiled again, and the tokens of eager mode."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from all_policies import ENTRY, make
from tiny import HANDED, make_cache, random_ids, tiny_model

STEPS, PROMPT = 60, 30
CASES = [("streaming", ENTRY, {}), ("kvpop_mlp", ENTRY, {"log_gamma": -0.3, "decay_step": 4})]


def prompted(model, policy):
    """A cache that holds what it keeps of a prompt longer than the budget, and the token after it, ``[1, 1]``."""
    cache = make_cache(model, policy)
    logits = model(random_ids(PROMPT), past_key_values=cache).logits
    return cache, logits[:, -1:].argmax(-1)


def decode(step, cache, token):
    """int64 ``[STEPS]`` greedy tokens, and the logits ``[STEPS, V]`` they came from."""
    found = []
    for _ in range(STEPS):
        found.append(step(token, cache)[0, -1])
        token = found[-1].argmax()[None, None]
    return torch.stack(found).argmax(-1), torch.stack(found)


@pytest.mark.slow
@pytest.mark.skipif(not HANDED, reason="under stock attention a step changes numbers on the host")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_step_is_one_graph_for_all_positions(case):
    """On a toy model; numba's loops are no part of a graph, so these are the torch forms that CUDA runs too."""
    model, policy = tiny_model(dtype=torch.float32), make(case)

    def step(token, cache):
        return model(token, past_key_values=cache).logits

    with torch.no_grad():
        expected, logits = decode(step, *prompted(model, policy))
        torch.compiler.reset()
        counters.clear()
        cache, token = prompted(model, policy)
        with torch._dynamo.config.patch(error_on_recompile=True):
            got, compiled_logits = decode(torch.compile(step, fullgraph=True, dynamic=False), cache, token)
    assert torch.equal(got, expected)
    assert (logits - compiled_logits).abs().max() <= 1e-3
    assert len(set(expected.tolist())) > 5, "the model says one thing again and again: the test has no teeth"
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert cache.get_seq_length() == PROMPT + STEPS
