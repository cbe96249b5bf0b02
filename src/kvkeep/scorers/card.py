"""The model card of a scorer: what it is, for which model, how it was made and how good it was."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from kvkeep.budget import Budget
from kvkeep.scorers.features import FeatureSpec

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
PAPERS = {"kvpop_mlp": "arXiv 2607.05061", "kvpop": "arXiv 2607.05061", "foresightkv": "arXiv 2602.03203"}
FEATURES = {"paper": FeatureSpec.paper(), "released": FeatureSpec.released(), "best": FeatureSpec.best()}
FEWEST = 2  # documents that an interval can be taken over


def model_card(record: Mapping[str, Any]) -> str:
    """README.md from what ``config.json`` says: a YAML header the hub understands, then text.

    Args:
        record: see :func:`kvkeep.scorers.checkpoint.describe`.
    """
    metadata, method, base = record["metadata"], record["method"], record["base_model"]
    tuned = metadata.get("tuned") if isinstance(metadata.get("tuned"), Mapping) else None
    header = {"library_name": "kvkeep", "tags": ["kvkeep", "kv-cache", "eviction", method]}
    if base and HUB_ID.fullmatch(base) and not os.path.exists(base):  # a folder may have the name of a stranger's model
        header["base_model"] = base
    if metadata.get("license"):
        header["license"] = metadata["license"]
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in header.items()), "---", ""]
    lines += [f"# A {method} scorer" + (f" for {base}" if base else "") + (", tuned" if tuned else ""), ""]
    lines += [
        "It scores the tokens in a KV cache by how much later queries will attend to them; kvkeep holds the cache to a",
        "fixed budget by it." + ("" if tuned else " It fits this base model only."),
        "",
        *(_after_tuning(tuned, base) if tuned else ()),
        *_usage(record, tuned),
    ]
    facts = _facts(record, tuned)
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    if metadata.get("command"):
        lines += ["## How it was made", "", "```", str(metadata["command"]), "```", ""]
    if record["metrics"]:
        title = "## Measured on the untuned model" if tuned else "## Measured"
        lines += [title, "", "| | value | 95 % interval |", "|---|---|---|"]
        lines += [*_rows("", record["metrics"], FEWEST), ""]
    return "\n".join(lines)


def _after_tuning(tuned: Mapping[str, Any], base: str | None) -> list[str]:
    """What became of a scorer whose backbone was tuned under it, see :mod:`kvkeep.training.tune`."""
    before = tuned.get("base_model") or base or "not recorded"
    return [
        f"It was trained on {tuned.get('scorer_trained_on', 'the untuned backbone')}: `{before}`, weights "
        f"`{tuned.get('base_fingerprint') or 'not recorded'}`.",
        "Decay and what was measured are of that. The backbone was then tuned under it, and now the scorer belongs to",
        "the tuned model in the folder above this one, and to no other.",
        "",
    ]


def _usage(record: Mapping[str, Any], tuned: Mapping[str, Any] | None) -> list[str]:
    """README's ten lines, with this scorer."""
    model, scorer = record["base_model"] or "its base model", "this folder"
    if tuned:
        model, scorer = "the tuned model", "the tuned model/scorer"
    slots = Budget(**record["budgets"][0]).slots + record["state_entries"]
    return [
        "```python",
        "import kvkeep",
        "from kvkeep.runtime.models import load  # or transformers' own from_pretrained",
        "",
        f'model, tokenizer = load({json.dumps(model)})  # with attn_implementation="kvkeep"',
        f"scorer = kvkeep.load_scorer({json.dumps(scorer)}, model=model)",
        f'policy = kvkeep.policies.create("{record["method"]}", scorer.budgets[0], scorer=scorer)'
        f"  # {slots} tokens per KV head",
        "cache = kvkeep.EvictingCache(model.config, policy)",
        'inputs = tokenizer("Once upon a time", return_tensors="pt")',
        "output = model.generate(**inputs, cache=cache, max_new_tokens=1000)  # past_key_values=cache before "
        "transformers 5.24",
        "print(tokenizer.decode(output[0]), cache.nbytes, cache.evicted)",
        "```",
        "",
    ]


def _facts(record: Mapping[str, Any], tuned: Mapping[str, Any] | None) -> dict[str, str]:
    layout, method, decay, entries = record["layout"], record["method"], record["decay"], record["state_entries"]
    budgets = [Budget(**budget) for budget in record["budgets"]]
    low, high = decay["log_gamma"]
    shape = layout["bounded"][0]
    facts = {
        "Policy": f"`{method}` ({PAPERS.get(method, 'kvkeep')})",
        "Base model": f"`{record['base_model'] or 'not recorded'}`{', tuned' if tuned else ''}, weights "
        f"`{record['base_fingerprint'] or 'not recorded'}`",
        "Works in": f"{len(layout['bounded'])} of {layout['layers']} layers, {shape['kv_heads']} KV heads of "
        f"{shape['head_dim']}",
        "Trained for": _bounds(budgets, entries),
    }
    if method == "foresightkv":
        facts |= _foresight(record, budgets)
    facts["Memory"] = f"charged as {entries} tokens" if entries else "none"
    if method != "foresightkv":  # which scores anew at every eviction
        facts["Decay"] = f"log gamma {low:.4g} to {high:.4g} per {decay['step']} tokens{_factors(decay)}"
    return facts | {
        "Options": f"`{json.dumps(record['options'])}`",
        "Data": f"`{record['data_fingerprint'] or 'not recorded'}`",
        "Made with": f"kvkeep {record['library_version']}",
    }


def _bounds(budgets: list[Budget], entries: int) -> str:
    """What users call the budgets: all slots, the memory included."""
    if not any(budget.interval for budget in budgets):
        return ", ".join(str(budget.slots + entries) for budget in budgets) + " tokens per KV head"
    return ", ".join(
        f"{budget.slots + entries} tokens per KV head ({budget.rest + entries} at rest)" for budget in budgets
    )


def _foresight(record: Mapping[str, Any], budgets: list[Budget]) -> dict[str, str]:
    metadata, features = record["metadata"], FeatureSpec.from_json(record["options"]["features"])
    recipe = metadata.get("recipe")
    preset = recipe.get("preset") if isinstance(recipe, Mapping) else None
    own = next((f"`{name}`: " for name, spec in FEATURES.items() if spec == features), "")
    intervals = ", ".join(f"{budget.interval} tokens at {budget.slots}" for budget in budgets)
    return {
        "Stage": f"`{metadata.get('stage') or 'not recorded'}`" + (f", preset `{preset}`" if preset else ""),
        "Features": own + ", ".join(_told(features)),
        "Decides": f"every interval: {intervals}",
    }


def _told(spec: FeatureSpec) -> list[str]:
    """Features in words, see :class:`~kvkeep.scorers.features.FeatureSpec`."""
    told = ["key (before the rotary embedding) and value" if spec.keys == "pre" else "key and value"] * spec.kv
    told += ["largest and smallest attention in the interval"] * spec.extremes
    if spec.windows:
        told.append(f"attention of the last {' '.join(map(str, spec.windows))} queries (L: the interval)")
    told += ["attention of all queries"] * spec.cumulative
    told += [] if spec.decay is None else [f"the same fading by {spec.decay:.4g} an interval"]
    return [*told, *["age"] * spec.age, f"normalised by `{spec.normalize}`"]


def _factors(decay: Mapping[str, Any]) -> str:
    return "".join(f", times {factor:.4g} where {rest} are held" for rest, factor in decay["factors"].items())


def _rows(name: str, metric: Any, documents: int) -> list[str]:
    """One row a number; what is grouped in a mapping is named after the group too.

    ``documents`` are those that the intervals of a group are taken over, where it says so.
    """
    if isinstance(metric, Mapping) and "value" not in metric:
        counted = metric.get("documents", documents)
        documents = counted if isinstance(counted, int) else documents
        prefix = f"{name}: " if name else ""
        return [row for part, value in metric.items() for row in _rows(f"{prefix}{part}", value, documents)]
    value, interval = (metric["value"], metric.get("interval")) if isinstance(metric, Mapping) else (metric, None)
    known = isinstance(interval, list | tuple) and documents >= FEWEST
    return [f"| {name} | {_number(value)} |{' ' + ' to '.join(map(_number, interval)) if known else ''} |"]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
