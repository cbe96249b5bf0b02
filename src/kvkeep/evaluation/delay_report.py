"""The result of the delay experiment as a page of markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.evaluation.hints import Hints

SHOWN = ("accuracy", "answer_loss", "loss_ratio")


def report(result: Mapping[str, Any], command: str) -> str:
    """The result as markdown.

    Args:
        result: what :func:`kvkeep.evaluation.delay.run` returns, or its JSON read back.
        command: what printed it.
    """
    settings = result["settings"]
    task = Hints(**settings["task"])
    sizes = settings["model"]
    lines = [
        "# Judging a token when it leaves the window",
        "",
        f"Printed by `{command}`.",
        "",
        f"**Task** (`kvkeep/evaluation/hints.py`). {task.length} tokens: {task.blocks} blocks of {task.block} items in "
        f"{task.colours} colours and one hint, then filler, then questions. The hint names a colour, at most "
        f"{task.block} tokens after an item; the items of its block that have it will be asked for at the end, "
        f"{task.questions} of {task.keys}. Nothing tells earlier. Guessing is right once in {task.values}.",
        "",
        f"**Model.** A Llama of {sizes['layers']} layers, {sizes['heads']} query and {sizes['kv_heads']} KV heads of "
        f"{sizes['head_dim']}, trained from scratch for {sizes['steps']} steps to answer for every item, kept or not, "
        "and to attend to the first token where there is nothing to look up.",
        "",
        f"**Budget.** {settings['slots']} tokens per KV head for every policy; window {task.window} and sinks "
        f"{settings['sinks']} for entry policies. The memory of `kvpop` has {settings['features']} feature and "
        "is paid for with top-k places: "
        f"{', '.join(f'{name} {entries}' for name, entries in result['memory'].items())} tokens.",
        "",
        f"**Scorers.** {settings['steps']} steps of {settings['batch']} episodes out of {settings['train']}, "
        f"{settings['seeds']} seeds each; learning rate {settings['lr']} for `best`, the preset's own for `published`.",
        "",
        "95 % bootstrap intervals over held-out episodes and seeds. *held*: share of asked items still in the cache "
        "when asked for, per layer, in the head that holds most. *loss ratio*: predictions past the budget, to the "
        "full cache.",
        "",
        "| policy | seeds | episodes | answers right | loss of an answer | loss ratio | held |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        held = " ".join(f"{share:.2f}" for share in row["held"])
        cells = [f"{row[name][0]:.3f} [{row[name][1]:.3f}, {row[name][2]:.3f}]" for name in SHOWN]
        lines.append(f"| {row['label']} | {row['seeds']} | {row['episodes']} | {' | '.join(cells)} | {held} |")
    lines += ["", "| difference in answers right, paired by seed and episode | |", "|---|---|"]
    for row in result["differences"]:
        value, low, high = row["accuracy"]
        lines.append(f"| {row['on']} - {row['off']} | {value:+.3f} [{low:+.3f}, {high:+.3f}] |")
    lines += ["", f"By seed: {'; '.join(_by_seed(row) for row in result['rows'] if row['seeds'] > 1)}."]
    return "\n".join(lines) + "\n"


def _by_seed(row: Mapping[str, Any]) -> str:
    return f"{row['label']} {' '.join(f'{accuracy:.3f}' for accuracy in row['accuracy_by_seed'])}"
