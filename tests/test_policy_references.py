"""Every policy's lifetimes against its definition, worked out one query at a time in plain loops.

The queries, keys and values of a layer are taken from a dense model masked by the replay's own lifetimes, so that a
layer is judged by what it was really given; everything after that is written down here once more.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep
from kvkeep import Budget, policies
from reference import interval_lifetimes, masked_forward
from tiny import random_ids, tiny_model

HEADS, SIZE = 2, 8


class Layer:
    """What one layer of the tiny model attends with, one row, and its softmax over any set of tokens."""

    def __init__(self, index, seen):
        query, key, value, _ = seen
        self.index, self.length = index, query.shape[2]
        self.query = query[0].unflatten(0, (HEADS, -1))  # [H, G, S, D]
        self.key, self.value = key[0], value[0]  # [H, S, D]
        self.group = range(self.query.shape[1])
        self.attention, self.logits = cache(self._attention), cache(self._logits)

    def _logits(self, head, member, query, tokens):
        asks = self.query[head, member, query]
        return [float(asks @ self.key[head, token]) / math.sqrt(SIZE) for token in tokens]

    def _attention(self, head, member, query, tokens):
        """Probabilities of one query head over exactly these tokens."""
        return dict(zip(tokens, softmax(self.logits(head, member, query, tokens)), strict=True))

    def mean_attention(self, head, query, tokens, token):
        """Mean over the group, of what one query gives one token."""
        return sum(self.attention(head, member, query, tokens)[token] for member in self.group) / len(self.group)


def softmax(numbers):
    most = max(numbers)
    weights = [math.exp(number - most) for number in numbers]
    return [weight / math.fsum(weights) for weight in weights]


# --- Attention policies: scores at the start of a query --------------------------------------------------------------


class Rule:
    """Keep scores by definition. ``saw[head][p]`` is what query p saw, since within an interval nothing goes."""

    def __init__(self, layer, policy, dense):
        self.layer, self.budget, self.options, self.dense = layer, policy.budget, policy.options(), dense
        self.saw = [[] for _ in range(HEADS)]

    def __call__(self, head, query, held):
        saw = self.saw[head]
        saw.extend(tuple(token for token in held if token <= p) for p in range(len(saw), query))
        return self.scores(head, query, tuple(held))


class Tova(Rule):
    def scores(self, head, query, held):
        voters = [head] if self.options["per_head"] else range(HEADS)
        return [sum(self.layer.mean_attention(h, query - 1, held, token) for h in voters) for token in held]


class H2O(Rule):
    def fade(self, p, query):
        return 1.0

    def scores(self, head, query, held):
        """What a token received from every query since it entered; it was held by all of them."""
        mean, saw = self.layer.mean_attention, self.saw[head]
        return [sum(self.fade(p, query) * mean(head, p, saw[p], t) for p in range(t, query)) for t in held]


class DecayedH2O(H2O):
    def fade(self, p, query):
        """The decay once for every interval that began after query p and before ``query``."""
        begins = [at for at in range(self.budget.rest, query, self.budget.interval) if p < at]
        return self.options["decay"] ** len(begins)


class SnapKV(Rule):
    def scores(self, head, query, held):
        observers = range(query - self.options["observation"], query)
        older = held[: len(held) - len(observers)]
        votes = dict.fromkeys(held, 0.0)
        for p in observers:
            whole = older if self.options["normalise"] == "older" else tuple(token for token in held if token <= p)
            for token, vote in zip(whole, self.vote(head, p, whole), strict=True):
                votes[token] += vote / len(observers)
        reach = self.options["kernel"] // 2
        pooled = [max(votes[t] for t in older[max(0, i - reach) : i + reach + 1]) for i in range(len(older))]
        return pooled + [votes[token] for token in held[len(older) :]]

    def vote(self, head, p, tokens):
        if self.options["head_reduce"] == "mean_prob":
            return [self.layer.mean_attention(head, p, tokens, token) for token in tokens]
        logits = [self.layer.logits(head, member, p, tokens) for member in self.layer.group]
        return softmax([max(of_token) for of_token in zip(*logits, strict=True)])


class RKV(SnapKV):
    def scores(self, head, query, held):
        keys = [self.layer.key[head, token] for token in held]
        column = [0.0] * len(held)
        for i, one in enumerate(keys):
            row = [0.0 if i == j else float(one @ other / (one.norm() * other.norm())) for j, other in enumerate(keys)]
            alike = [j for j, cosine in enumerate(row) if cosine > self.options["threshold"] and j != i]
            if alike:
                row[alike[-1]] = 0.0
            column = [total + cosine / len(held) for total, cosine in zip(column, row, strict=True)]
        mix, attention = self.options["mix"], super().scores(head, query, held)
        return [mix * a - (1 - mix) * s for a, s in zip(attention, softmax(column), strict=True)]


class ExpectedAttention(Rule):
    def scores(self, head, query, held):
        """Moments of the queries seen, turned back by complex numbers, then turned to the mean of those to come."""
        horizon, half = self.options["horizon"], SIZE // 2
        frequency = (1 / 10000.0 ** (torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE)).double()
        turn = torch.exp(1j * torch.arange(query + horizon)[:, None] * frequency)
        coming = turn[query:].mean(0)
        expected = [0.0] * len(held)
        for member in self.layer.group:
            turned = self.layer.query[head, member, :query]
            plain = torch.complex(turned[:, :half], turned[:, half:]) / turn[:query]
            foreseen = plain * coming  # R is linear: the moments of R x are R mu and R Sigma R^T
            foreseen = torch.cat([foreseen.real, foreseen.imag], -1)
            mean, spread = foreseen.mean(0), torch.cov(foreseen.T, correction=0)
            z = []
            for token in held:
                key = self.layer.key[head, token] / math.sqrt(SIZE)
                z.append(float(mean @ key + self.options["use_covariance"] * (key @ spread @ key) / 2))
            expected = [a + b / len(self.layer.group) for a, b in zip(expected, softmax(z), strict=True)]
        lengths = [float(self.layer.value[head, token].norm()) for token in held]
        return [(a + self.options["epsilon"]) * v for a, v in zip(expected, lengths, strict=True)]


class KeyDiff(Rule):
    def scores(self, head, query, held):
        """Minus the cosine between a key and the mean of all keys held, each of length 1."""
        keys = [self.layer.key[head, token] for token in held]
        anchor = sum(key / key.norm() for key in keys) / len(keys)
        return [-float(key @ anchor / (key.norm() * anchor.norm())) for key in keys]


class Golden(Rule):
    def scores(self, head, query, held):
        """The most that a token gets from this block of queries or a later one, of the model it is judged by."""
        judge = self.dense if self.options["labels"] == "full" else self.layer
        length, interval = judge.length, self.budget.interval
        blocks = [range(at, min(at + interval, length)) for at in range(query, length, interval)]
        blocks = blocks[: self.options["lookahead"]]
        return [max(self.block_mean(judge, head, block, token) for block in blocks) for token in held]

    def block_mean(self, judge, head, block, token):
        count = self.budget.interval if self.options["partial"] == "zero_pad" else len(block)
        given = [
            math.fsum(judge.attention(head, m, q, tuple(range(q + 1)))[token] for q in block if token <= q) / count
            for m in judge.group
        ]
        return max(given) if self.options["head_reduce"] == "max" else sum(given) / len(given)


# --- Entry policies: priorities and sets -----------------------------------------------------------------------------


def streaming(layer, policy, head):
    return [0.0] * layer.length


def random(layer, policy, head):
    """SplitMix64 of (seed, layer, head, position) in plain integers; the lowest 24 bits."""

    def mix(state):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    stream = mix(mix(mix(policy.seed) + layer.index) + head)
    return [mix(stream + position) % 2**24 for position in range(layer.length)]


def future_mass(layer, policy, head):
    """Equations 3 and 4 of KVpop, with the decay of section 3."""
    priorities, window = [], policy.budget.window
    for token in range(layer.length):
        later = range(token + window, layer.length)
        count = max(1, len(later)) if policy.count_normalised else 1
        given = [[layer.attention(head, m, d, tuple(range(d + 1)))[token] for d in later] for m in layer.group]
        mass = [math.fsum(of_head) / count for of_head in given]
        if policy.group == "log_mean":
            target = math.log(policy.eps + sum(mass) / len(mass))
        else:
            logs = [math.log(policy.eps + m) for m in mass]
            target = max(logs) if policy.group == "max" else sum(logs) / len(logs)
        priorities.append(target - token // policy.step * policy.log_gamma)
    return priorities


def set_lifetimes(priority, budget):
    """When each token first is neither sink, nor in the window, nor among the k best that have left it."""
    length = len(priority)
    evicted_at = [length] * length
    for query in range(length):
        eligible = range(budget.sinks, query - budget.window + 1)
        best = sorted(eligible, key=lambda t: (priority[t], t), reverse=True)[: budget.topk]
        held = {*range(min(budget.sinks, query + 1)), *best, *range(max(0, query - budget.window + 1), query + 1)}
        for token in range(query + 1):
            assert token not in held or evicted_at[token] == length, "a token came back"
            if token not in held:
                evicted_at[token] = min(evicted_at[token], query)
    return evicted_at


# --- The comparison --------------------------------------------------------------------------------------------------

RULES = {
    "tova": Tova, "h2o": H2O, "h2o_decayed": DecayedH2O, "snapkv": SnapKV, "rkv": RKV,
    "expected_attention": ExpectedAttention, "keydiff": KeyDiff, "golden": Golden,
}  # fmt: skip
PRIORITIES = {"streaming": streaming, "random": random, "future_mass": future_mass}
VOTES = {
    "observation": st.integers(1, 6), "kernel": st.sampled_from([1, 3, 5, 7]),
    "head_reduce": st.sampled_from(["mean_prob", "max_logit"]), "normalise": st.sampled_from(["held", "older"]),
}  # fmt: skip
OPTIONS = {
    "streaming": {},
    "random": {"seed": st.integers(-(2**40), 2**40)},
    "future_mass": {
        "group": st.sampled_from(["max", "mean_log", "log_mean"]),
        "count_normalised": st.booleans(),
        "log_gamma": st.sampled_from([0.0, -0.05, -1.0]),
        "step": st.integers(1, 9),
    },
    "tova": {"per_head": st.booleans()},
    "h2o": {},
    "h2o_decayed": {"decay": st.sampled_from([None, 0.5, 1.0])},
    "snapkv": VOTES,
    "rkv": VOTES | {"mix": st.sampled_from([0.1, 0.5, 1.0]), "threshold": st.sampled_from([0.0, 0.3, 0.5])},
    "expected_attention": {
        "horizon": st.integers(1, 40),
        "epsilon": st.sampled_from([0.0, 0.02]),
        "use_covariance": st.booleans(),
    },
    "keydiff": {},
    "golden": {
        "labels": st.sampled_from(["full", "own"]),
        "lookahead": st.sampled_from([None, 1, 2]),
        "head_reduce": st.sampled_from(["mean", "max"]),
        "partial": st.sampled_from(["mean", "zero_pad"]),
    },
}


@st.composite
def settings_of(draw, name):
    """A policy with a random budget and random options, and a length at which it evicts a few times."""
    sinks, topk = draw(st.integers(0, 3)), draw(st.integers(1, 8))
    if name in RULES:
        budget = Budget(sinks, draw(st.integers(0, 6)), max(topk, 7 - sinks), draw(st.sampled_from([1, 2, 3, 5, 8])))
    else:
        budget = Budget(sinks, draw(st.integers(1, 6)), topk)
    options = {option: draw(values) for option, values in OPTIONS[name].items()}
    length = budget.slots + draw(st.integers(1, 3 * budget.interval + 4 if budget.interval else 24))
    return policies.create(name, budget, **options), length


def expected_lifetimes(policy, layer, dense):
    if policy.name in RULES:
        rule = RULES[policy.name](layer, policy, dense)
        return interval_lifetimes(rule, policy.budget, layer.length, HEADS)
    priority = PRIORITIES[policy.name]
    rows = [set_lifetimes(priority(layer, policy, head), policy.budget) for head in range(HEADS)]
    return torch.tensor([rows], dtype=torch.int32)


@pytest.mark.parametrize("name", [*PRIORITIES, *RULES])
@settings(max_examples=60)
@given(data=st.data(), group=st.sampled_from([1, 2, 3]), seed=st.integers(0, 10**6))
def test_lifetimes_are_those_of_the_definition(name, data, group, seed):
    policy, length = data.draw(settings_of(name))
    model, ids = tiny_model(group=group, kv_heads=HEADS, seed=seed), random_ids(length, seed=seed)
    result = kvkeep.replay(model, ids, policy)
    _, dense = masked_forward(model, ids, [None] * 2)
    _, sparse = masked_forward(model, ids, result.evicted_at)
    for index, got in enumerate(result.evicted_at):
        expected = expected_lifetimes(policy, Layer(index, sparse[index]), Layer(index, dense[index]))
        assert torch.equal(got, expected), f"layer {index}"
        assert bool((got < length).any())
