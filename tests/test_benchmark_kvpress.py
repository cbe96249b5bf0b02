"""Our side of the comparison with kvpress, and what happens where the other side is missing.

kvpress itself is run by hand only (docs/speed.md): it needs another transformers.
"""

from __future__ import annotations

import sys

import pytest
import torch

from kvkeep.benchmark import kvpress, kvpress_guest
from kvkeep.benchmark.kvpress import RULES, KeyNorm, Ours, policy_of
from kvkeep.benchmark.timing import settings
from kvkeep.policies.base import AttentionPolicy
from reference import interval_lifetimes, masked_forward
from tiny import HANDED, random_ids, tiny_model

pytestmark = pytest.mark.skipif(not HANDED, reason="attention policies need a transformers that hands keywords down")
REST, INTERVAL = 40, 16


@pytest.mark.parametrize("name", RULES)
def test_both_sides_hold_as_many_tokens_after_an_eviction(name):
    rule = RULES[name]
    every = rule.interval or INTERVAL
    policy = policy_of(name, rule, REST, every)
    assert policy.budget.rest == REST
    assert policy.budget.interval == (0 if name == "streaming" else every)
    assert isinstance(policy, AttentionPolicy) or name == "streaming"


def test_keynorm_keeps_the_smallest_keys():
    model, ids = tiny_model(), random_ids(REST + 2 * INTERVAL + 1)
    budget = policy_of("keynorm", RULES["keynorm"], REST, INTERVAL).budget
    _, seen = masked_forward(model, ids, [None, None])
    norms = seen[0][1][0].norm(dim=-1)  # keys of layer 0 depend on no eviction
    expected = interval_lifetimes(lambda head, _, held: -norms[head][held], budget, ids.shape[1], 2)
    ours = Ours(model, KeyNorm(budget), ids[0].tolist(), REST)
    for _ in range(2 * INTERVAL + 1):
        assert ours.step() > 0
    alive = [(expected[0, head] == ids.shape[1]).nonzero()[:, 0].tolist() for head in range(2)]
    assert ours.kept(before=ids.shape[1])[0] == alive
    assert ours.kept(before=10)[0] == [[p for p in head if p < 10] for head in alive]


def test_sizes_are_of_all_that_is_held():
    model, ids = tiny_model(), random_ids(REST + 3)[0].tolist()
    ours = Ours(model, policy_of("snapkv", RULES["snapkv"], REST, INTERVAL), ids, REST)
    ours.step()
    slots = (REST + INTERVAL) * 2 * 8 * 8 * 2 * 2
    assert slots < ours.sizes()["held_bytes"] < 2 * slots
    assert ours.sizes()["peak_growth"] >= 0


def test_the_table_says_what_was_found():
    row = {
        "rule": "tova",
        "differs": "",
        "interval": 1,
        "rest": 96,
        "attention": "sdpa",
        "evictions": 64,
        "ratio": 1.234,
    }
    row |= {"ms_mean": 80.0, "ms_median": 79.0, "other_ms_mean": 98.7, "other_ms_median": 97.0}
    row |= {"held_bytes": 1_500_000, "other_held_bytes": 2_500_000, "peak_growth": 0, "other_peak_growth": 4096}
    row |= {"agreement_first": 1.0, "agreement_last": 0.987}
    row |= {"versions": {"kvpress": "0.5.5", "torch": "2.13", "transformers": "5.2"}}
    told = settings(torch.device("cpu"), model="m", dtype="float32")
    page = kvpress.markdown({"rows": [row, row | {"rule": "snapkv", "differs": "so and so"}], "settings": told})
    assert "| tova | 1 | 80.0 | 98.7 | 1.23 | 79.0 | 97.0 | 1.50 | 2.50 | 0.00 | 0.00 | 1.000 | 0.987 | 64 |" in page
    assert "kvpress 0.5.5, torch 2.13, transformers 5.2" in page
    assert page.endswith("snapkv: so and so.\n")


def test_shares_of_kept_tokens_are_averaged_over_layers_and_heads():
    mine, other = [[[0, 1, 2, 3], [0, 1]], [[5, 6], [7, 8]]], [[[2, 3, 4], [0, 1]], [[5, 6], [1, 2]]]
    assert kvpress._share(mine, other) == pytest.approx((2 / 3 + 1 + 1 + 0) / 4)


def test_the_guest_follows_positions_through_any_order():
    session = object.__new__(kvpress_guest.Session)
    session.torch, session.positions, session.done = torch, {}, 5
    before = torch.randn(1, 2, 6, 4)
    order = torch.tensor([[5, 0, 3], [2, 1, 4]])
    kept = before.gather(2, order[None, :, :, None].expand(1, 2, 3, 4))
    session.follow(0, before, kept)
    assert session.positions[0].tolist() == order.tolist()
    session.done = 7  # two tokens later
    before = torch.cat([kept, torch.randn(1, 2, 2, 4)], 2)
    order = torch.tensor([[4, 0, 1], [3, 4, 2]])
    session.follow(0, before, before.gather(2, order[None, :, :, None].expand(1, 2, 3, 4)))
    assert session.positions[0].tolist() == [[7, 5, 0], [6, 7, 4]]
    assert session.kept() == [[[0, 5, 7], [4, 6, 7]]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rules", "h2o"), "rules are keynorm, tova, snapkv, streaming, expected_attention, not h2o"),
        (("--rules", ","), "not nothing"),
        (("--budget", "128"), "a budget of 128 with 2 intervals of 128 is not compared"),
        (("--interval", "8"), "an interval of at least 16"),
        (("--json", "nowhere/out.json"), "no folder"),
    ],
)
def test_mistakes_are_one_sentence(capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        kvpress.main(["--python", "python", *arguments])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_python_without_kvpress_says_so(folder, capsys):
    numbers = ("--budget", "64", "--interval", "16", "--intervals", "1", "--rules", "keynorm")
    for python, words in ((sys.executable, "No module named 'kvpress'"), ("false", "ended without an answer")):
        with pytest.raises(SystemExit) as stopped:
            kvpress.main(["--python", python, "--model", str(folder), *numbers])
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err
    assert torch.is_grad_enabled(), "whoever calls it may go on to train"
