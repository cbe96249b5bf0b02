"""The model card of a scorer: what it is, for which model, how it was made and how good it was."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PAPERS = {"kvpop_mlp": "arXiv 2607.05061", "kvpop": "arXiv 2607.05061", "foresightkv": "arXiv 2602.03203"}


def model_card(record: Mapping[str, Any]) -> str:
    """README.md from what ``config.json`` says: a YAML header the hub understands, then text.

    Args:
        record: see :func:`kvkeep.scorers.checkpoint.describe`.
    """
    metadata, layout, method = record["metadata"], record["layout"], record["method"]
    base = record["base_model"]
    header = {"library_name": "kvkeep", "tags": ["kvkeep", "kv-cache", "eviction", method]}
    if base and HUB_ID.fullmatch(base):  # the hub takes nothing else
        header["base_model"] = base
    if metadata.get("license"):
        header["license"] = metadata["license"]
    budgets = ", ".join(str(_slots(budget) + record["state_entries"]) for budget in record["budgets"])
    low, high = record["decay"]["log_gamma"]
    shape = layout["bounded"][0]
    facts = {
        "Policy": f"`{method}` ({PAPERS.get(method, 'kvkeep')})",
        "Base model": f"`{base or 'not recorded'}`, weights `{record['base_fingerprint'] or 'not recorded'}`",
        "Works in": f"{len(layout['bounded'])} of {layout['layers']} layers, {shape['kv_heads']} KV heads of "
        f"{shape['head_dim']}",
        "Trained for": f"{budgets} tokens per KV head",
        "Memory": f"charged as {record['state_entries']} tokens" if record["state_entries"] else "none",
        "Decay": f"log gamma {low:.4g} to {high:.4g} per {record['decay']['step']} tokens{_factors(record['decay'])}",
        "Options": f"`{json.dumps(record['options'])}`",
        "Data": f"`{record['data_fingerprint'] or 'not recorded'}`",
        "Made with": f"kvkeep {record['library_version']}",
    }
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in header.items()), "---", ""]
    lines += [f"# A {method} scorer" + (f" for {base}" if base else ""), ""]
    lines += [
        "It scores the tokens in a KV cache by how much later queries will attend to them; kvkeep holds the cache to a",
        "fixed budget by it. It fits this base model only.",
        "",
        "```python",
        "import kvkeep",
        "",
        'scorer = kvkeep.load_scorer("this folder")',
        f'policy = kvkeep.policies.create("{method}", {budgets.split(",")[0]}, scorer=scorer)',
        "cache = kvkeep.EvictingCache(model.config, policy)",
        "model.generate(**inputs, past_key_values=cache)",
        "```",
        "",
    ]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    if metadata.get("command"):
        lines += ["## How it was made", "", "```", str(metadata["command"]), "```", ""]
    if record["metrics"]:
        lines += ["## Measured", "", "| | value | 95 % interval |", "|---|---|---|"]
        lines += [row for name, value in record["metrics"].items() for row in _rows(name, value)] + [""]
    return "\n".join(lines)


def _slots(budget: Mapping[str, int]) -> int:
    return budget["sinks"] + budget["window"] + budget["topk"] + budget["interval"]


def _factors(decay: Mapping[str, Any]) -> str:
    return "".join(f", times {factor:.4g} where {rest} are held" for rest, factor in decay["factors"].items())


def _rows(name: str, metric: Any) -> list[str]:
    """One row a number; what is grouped in a mapping is named after the group too."""
    if isinstance(metric, Mapping) and "value" not in metric:
        return [row for part, value in metric.items() for row in _rows(f"{name}: {part}", value)]
    if not isinstance(metric, Mapping):
        return [f"| {name} | {_number(metric)} | |"]
    interval = metric.get("interval")
    return [f"| {name} | {_number(metric['value'])} | {' to '.join(map(_number, interval)) if interval else ''} |"]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
