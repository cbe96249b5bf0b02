"""kvkeep beside kvpress's DecodingPress: `python -m kvkeep.benchmark.kvpress --python OTHER/bin/python`.

kvpress lives in an environment of its own, whose python runs ``kvpress_guest.py``. Both sides decode the same text with
the same model, rule, budget and interval, a token each in turn, so that a busy machine slows both alike; both count the
processor time of their only thread. Whole intervals count, so that what an eviction costs is in, after a first one that
does not.

What is compared is what each library does: kvpress concatenates, and gathers the survivors in order of score; positions
are those of the text on both sides. Where the rule is the same by definition, the tokens kept after every eviction are
compared too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep import policies
from kvkeep.benchmark import kvpress_guest
from kvkeep.benchmark.caches import reachable_bytes
from kvkeep.benchmark.timing import digits, load_average, settings
from kvkeep.budget import Budget
from kvkeep.evaluation import documents
from kvkeep.evaluation.report import grid
from kvkeep.evaluation.store import require_writable, write_atomic
from kvkeep.policies.base import AttentionPolicy, Held, Policy
from kvkeep.runtime import models
from kvkeep.runtime.cache import EvictingCache, cache_keyword

GUEST = Path(kvpress_guest.__file__)


class KeyNorm(AttentionPolicy):
    """kvpress's KnormPress as a policy, to compare like with like: keys of small norm stay, nothing is protected."""

    name = "keynorm"
    paper = "arXiv 2406.11430"

    def keep_scores(self, held: Held) -> Tensor:
        return -held.keys.norm(dim=-1)


@dataclass(frozen=True)
class Rule:
    """One rule on both sides.

    Attributes:
        press: the class in kvpress, with its options.
        options: of the policy.
        sinks, window: of its budget; top-k is what is left.
        interval: 1 for a rule that evicts at every token, None for the one asked for.
        differs: where the two definitions part; empty where the same tokens should stay.
    """

    press: str
    press_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    sinks: int = 0
    window: int = 0
    interval: int | None = None
    differs: str = ""


RULES: dict[str, Rule] = {
    "keynorm": Rule("KnormPress"),
    "tova": Rule("TOVAPress", window=1, interval=1),
    "snapkv": Rule(
        "SnapKVPress",
        {"window_size": 8, "kernel_size": 1},
        {"observation": 8, "kernel": 1},
        window=8,
        differs="kvpress rotates the observing queries to one position; no pooling on either side",
    ),
    "streaming": Rule(
        "StreamingLLMPress",
        {"n_sink": 4},
        sinks=4,
        window=1,
        differs="kvpress takes a token's place in the cache for its age; kvkeep evicts at every token",
    ),
    "expected_attention": Rule(
        "ExpectedAttentionPress",
        {"n_future_positions": 512, "epsilon": 0.0},
        {"horizon": 512, "epsilon": 0.0},
        sinks=4,
        differs="kvpress foresees positions counted from its buffer of hidden states",
    ),
}


def policy_of(name: str, rule: Rule, rest: int, interval: int) -> Policy:
    """Our side of a rule, which holds ``rest`` tokens after an eviction and ``rest + interval`` before."""
    if name == "streaming":  # an entry policy: it never holds more than rest
        return policies.create(name, Budget(rule.sinks, rule.window, rest - rule.sinks - rule.window))
    budget = Budget(rule.sinks, rule.window, rest - rule.sinks - rule.window, interval)
    return KeyNorm(budget) if name == KeyNorm.name else policies.create(name, budget, **rule.options)


class Ours:
    """kvkeep's side, with the answers of a guest's session."""

    def __init__(self, model, policy: Policy, ids: Sequence[int], prompt: int):
        self.model, self.ids, self.done = model, ids, 0
        self.cache = EvictingCache(model.config, policy)
        self.forward(prompt)
        kvpress_guest.reset_peak()
        self.start = kvpress_guest.status("VmRSS")
        self.most = 0

    def forward(self, count: int) -> None:
        ids = torch.tensor([self.ids[self.done : self.done + count]])
        where = torch.arange(self.done, self.done + count)[None]
        self.model(ids, position_ids=where, use_cache=True, **{cache_keyword(self.model): self.cache})
        self.done += count

    def step(self) -> float:
        start = time.thread_time()
        self.forward(1)
        spent = 1000 * (time.thread_time() - start)
        held = sum(reachable_bytes(layer.residency) for layer in self.cache.evicting_layers)
        self.most = max(self.most, held)
        return spent

    def kept(self, before: int) -> list[list[list[int]]]:
        """Positions below ``before`` that are held, ``[layer][head]`` in order."""
        layers = (layer.positions[0] for layer in self.cache.evicting_layers)
        return [[sorted(p for p in head if 0 <= p < before) for head in layer.tolist()] for layer in layers]

    def sizes(self) -> dict[str, int]:
        return {"held_bytes": self.most, "peak_growth": kvpress_guest.status("VmHWM") - self.start}


class Guest:
    """The other python at work."""

    def __init__(self, python: str, asked: Mapping[str, Any]):
        command = [python, "-I", str(GUEST)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.versions = self.ask("start", **asked)
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, **more: Any) -> Any:
        """The answer to one request.

        Raises:
            ValueError: if it fails or ends.
        """
        try:
            print(json.dumps({"do": what} | more), file=self.process.stdin, flush=True)
            said = json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            raise ValueError("the other python ended without an answer: does it have kvpress and torch?") from error
        if isinstance(said, dict) and "error" in said:
            raise ValueError(f"the other python: {said['error']}")
        return said

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


def compare(
    model,
    source: str,
    python: str,
    name: str,
    rest: int,
    interval: int,
    intervals: int,
    ids: Sequence[int],
    attention: str,
) -> dict[str, Any]:
    """One rule on both sides.

    Args:
        model: ours, on the CPU.
        source: where the other side loads it from.
        python: of the environment with kvpress.
        name: of ``RULES``.
        rest: tokens after an eviction; also the length of the prompt, so that both sides evict at the same tokens.
        interval: between evictions, except for a rule that has its own.
        intervals: that count, after one that does not.
        ids: at least ``rest + (intervals + 1) * interval`` tokens.
        attention: of the other side.

    Returns:
        One row of the result.

    Raises:
        ValueError: for a text too short, or what the other python reports.
    """
    rule = RULES[name]
    every = rule.interval or interval
    steps = (intervals + 1) * interval
    if len(ids) < rest + steps:
        raise ValueError(f"the text has {len(ids)} tokens; {rest + steps} are needed")
    dtype = str(model.dtype).removeprefix("torch.")
    asked = {"model": source, "dtype": dtype, "attention": attention, "ids": list(ids), "prompt": rest}
    asked |= {"press": rule.press, "options": dict(rule.press_options), "target": rest, "interval": every}
    asked["buffer"] = max(rule.press_options.get("window_size", 0) + 1, interval if "expected" in name else 1)
    guest = Guest(python, asked | {"watch": False})
    try:
        ours = Ours(model, policy_of(name, rule, rest, every), ids, rest)
        spent = [(ours.step(), guest.ask("step")) for _ in range(steps)][interval:]
        sizes = ours.sizes(), guest.ask("sizes")
    finally:
        guest.close()
    mine, other = ([one[side] for one in spent] for side in (0, 1))
    row = {
        "rule": name,
        "press": rule.press,
        "differs": rule.differs,
        "rest": rest,
        "interval": every,
        "dtype": dtype,
        "attention": attention,
        "ms_mean": digits(statistics.mean(mine)),
        "ms_median": digits(statistics.median(mine)),
        "other_ms_mean": digits(statistics.mean(other)),
        "other_ms_median": digits(statistics.median(other)),
        "ratio": round(sum(other) / sum(mine), 3),
    }
    for side, found in zip(("", "other_"), sizes, strict=True):
        row |= {side + key: value for key, value in found.items()}
    row |= agreement(model, python, asked, name, rule, rest, every, intervals * interval // every, ids)
    return row | {"versions": guest.versions}


def agreement(
    model, python: str, asked: dict, name: str, rule: Rule, rest: int, every: int, evictions: int, ids
) -> dict:
    """Shares of the tokens kept on both sides after the first eviction, and the last: mean over layers and heads."""
    guest = Guest(python, asked | {"watch": True})
    try:
        ours = Ours(model, policy_of(name, rule, rest, every), ids, rest)
        ours.step()  # one ahead: they evict after a token, we before the next
        shares = {}
        for eviction in range(1, evictions + 1):
            for _ in range(every):
                ours.step()
                guest.ask("step")
            if eviction in (1, evictions):
                shares[eviction] = digits(_share(ours.kept(before=ours.done - 1), guest.ask("kept")))
    finally:
        guest.close()
    return {"agreement_first": shares[1], "agreement_last": shares[evictions], "evictions": evictions}


def _share(mine: list, other: list) -> float:
    shares = [
        len(set(ours) & set(theirs)) / len(theirs)
        for layer in zip(mine, other, strict=True)
        for ours, theirs in zip(*layer, strict=True)
    ]
    return statistics.mean(shares)


MEGABYTES = ".2f"
COLUMNS = (
    ("rule", "rule", ""),
    ("interval", "interval", ""),
    ("kvkeep ms", "ms_mean", ".1f"),
    ("kvpress ms", "other_ms_mean", ".1f"),
    ("kvpress / kvkeep", "ratio", ".3g"),
    ("kvkeep median", "ms_median", ".1f"),
    ("kvpress median", "other_ms_median", ".1f"),
    ("kvkeep holds", "held_bytes", MEGABYTES),
    ("kvpress holds", "other_held_bytes", MEGABYTES),
    ("kvkeep grew", "peak_growth", MEGABYTES),
    ("kvpress grew", "other_peak_growth", MEGABYTES),
    ("same after 1", "agreement_first", ".3f"),
    ("same after", "agreement_last", ".3f"),
    ("evictions", "evictions", ""),
)


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a table, with what stands behind it."""
    told, rows = result["settings"], result["rows"]
    shown = [row | {key: row[key] / 1e6 for _, key, form in COLUMNS if form == MEGABYTES} for row in rows]
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    lines = [
        f"{told['model']}, {told['dtype']}, {told['processor']}, {told['threads']} thread, {told['clock']}; kvpress's "
        f"side {versions}, attention {rows[0]['attention']}; ours torch {told['torch']}, transformers "
        f"{told['transformers']}; load average {told['load_average']} before and {told['load_average_after']} after. "
        f"{rows[0]['rest']} tokens after an eviction. Times of a token, means over whole intervals and medians; MB "
        "held at most, and by which the resident set grew at most; share of the tokens kept that both keep, after the "
        "first eviction and after as many as stand there.",
        "",
        *grid(
            [title for title, *_ in COLUMNS], [[format(row[key], form) for _, key, form in COLUMNS] for row in shown]
        ),
        "",
    ]
    lines += [f"{row['rule']}: {row['differs']}." for row in rows if row["differs"]]
    return "\n".join(lines) + "\n"


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvkeep.benchmark.kvpress", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python", required=True, help="the python of an environment with kvpress, torch, transformers"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rules", default=",".join(RULES), help=f"any of {', '.join(RULES)}")
    parser.add_argument("--budget", type=int, default=512, help="tokens held at most")
    parser.add_argument("--interval", type=int, default=128, help="tokens between two evictions")
    parser.add_argument("--intervals", type=int, default=2, help="that count")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"], help="of kvpress's side")
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args(given)


@torch.no_grad()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for.

    Raises:
        ValueError: for an unknown rule, impossible numbers, or a python that does not do.
    """
    names = options.rules.replace(",", " ").split()
    unknown = [name for name in names if name not in RULES]
    if unknown or not names:
        raise ValueError(f"rules are {', '.join(RULES)}, not {', '.join(unknown) or 'nothing'}")
    rest = options.budget - options.interval
    if options.interval < 16 or rest < 32 or options.intervals < 1:
        raise ValueError(
            f"a budget of {options.budget} with {options.intervals} intervals of {options.interval} is not compared: "
            "take an interval of at least 16, a budget of at least 32 more, and one interval or more"
        )
    require_writable(options.json, "--json")
    torch.set_num_threads(1)
    source = str(models.resolve(options.model))
    model, tokenizer = models.load(options.model, options.dtype)
    told = settings(model.device, model=options.model, dtype=options.dtype)
    ids = tokenizer("\n\n".join(document.text for document in documents.bundled(kinds=("prose",))))["input_ids"]
    rows = []
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        given = (rest, options.interval, options.intervals, ids, options.attention)
        rows.append(compare(model, source, options.python, name, *given))
    told["load_average_after"] = load_average()
    return {"rows": rows, "settings": told}


def main(given: Sequence[str] | None = None) -> None:
    """Print the table; exit code 2 with one sentence where there is none."""
    options = arguments(sys.argv[1:] if given is None else given)
    try:
        result = run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if options.json is not None:
        write_atomic(options.json, json.dumps(result, indent=1) + "\n")
    print(markdown(result), end="")


if __name__ == "__main__":
    main()
