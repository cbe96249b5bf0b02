"""`kvkeep evaluate`: what eviction costs, per policy and budget, as a table and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep import policies
from kvkeep.cli import common
from kvkeep.evaluation import documents
from kvkeep.evaluation.contenders import Contender, line_up
from kvkeep.evaluation.evaluate import evaluate, first_measured
from kvkeep.evaluation.gaps import gap_table, gaps
from kvkeep.evaluation.store import require_writable, write_atomic
from kvkeep.evaluation.table import recall_table, table

DataFlag = Annotated[list[Path] | None, typer.Option("--data", metavar="FILE...", help="Texts; the bundled ones else.")]
CountFlag = Annotated[int | None, typer.Option("--documents", min=1, help="At most so many, of all kinds in turn.")]
RecallFlag = Annotated[
    bool, typer.Option("--recall", help="Also what is held of KVpop's teacher, per layer; one more pass a document.")
]

LEGEND = """
loss ratio: loss under the policy over loss with the full cache, same tokens; 95 % bootstrap interval over documents.
low, high: the ratio on the 80 % of tokens that the full model is surest of, and on the rest.
*: the best without training or foresight.
"""
RECALL_LEGEND = """
recall: share of the teacher's top-k that is held where a policy evicts; by chance: k of the tokens it chooses from.
output cosine: attention's output over the tokens held with that over all. Monitors, not goals: losses decide.
"""


def run(
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files for --data.")] = None,
    model: common.ModelFlag = common.DEFAULT_MODEL,
    policy_names: Annotated[
        str, typer.Option("--policies", help="Names, a,b:option=value,c:interval=16; all: that need no scorer.")
    ] = "all",
    budgets: Annotated[str, typer.Option("--budgets", help="Tokens per KV head, like 128,256.")] = "128",
    length: Annotated[int, typer.Option("--length", min=3, help="Tokens of every document.")] = 1024,
    data: DataFlag = None,
    kinds: Annotated[str | None, typer.Option("--kinds", help="Only documents of these, like prose,code.")] = None,
    count: CountFlag = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Result; work is kept beside it.")] = None,
    sinks: common.SinksFlag = None,
    window: common.WindowFlag = None,
    interval: common.IntervalFlag = None,
    budget_at_rest: common.AtRestFlag = False,
    scorer: common.ScorersFlag = None,
    dtype: common.DtypeFlag = None,
    device: common.DeviceFlag = None,
    recall: RecallFlag = False,
    seed: common.SeedFlag = 0,
) -> None:
    """Measure what eviction costs.

    The model reads documents under every policy; its loss is compared with that of the full cache. With
    --json, finished work is kept in FILE.work, and the same command goes on where it was stopped.
    """
    contenders = line_up(
        policies.names() if policy_names == "all" else common.names(policy_names),
        seed=seed,
        at_rest=budget_at_rest,
        overrides={"sinks": sinks, "window": window, "interval": interval},
        scorers=common.scorers(scorer or []),
    )
    common.require_intervals(interval, contenders)
    tokens = common.numbers(budgets, "--budgets")
    ready = [one for one in contenders if one.scorer is not None or not policies.describe(one.name).learned]
    for budget in tokens if ready else ():
        first_measured(ready, budget, length)
    require_writable(out, "--json")
    texts = _texts([*(data or []), *(more or [])], kinds)
    language_model, tokenizer = common.load(model, dtype, device)
    packed = documents.pack(texts, tokenizer, length)
    chosen = documents.in_turn(packed, count)
    contenders = _equipped(contenders, language_model, policy_names == "all")
    common.tell_skipped(packed, length)
    settings = {"model": model, "documents_skipped": len(packed.skipped)}
    result = measured(language_model, chosen, contenders, tokens, length, seed, out, settings, recall)
    if out is not None:
        write_atomic(out, json.dumps(result, indent=1, allow_nan=False) + "\n")
    show(result)
    if out is not None:
        typer.echo(f"written to {out}")


def measured(
    model: Any,
    packed: Sequence[tuple[Any, Any]],
    contenders: Sequence[Contender],
    budgets: Sequence[int],
    length: int,
    seed: int,
    out: Path | None,
    settings: dict[str, Any],
    recall: bool = False,
) -> dict[str, Any]:
    """`evaluate` with a progress bar, keeping its work beside `out`."""
    work = None if out is None else out.with_name(out.name + ".work")
    try:
        with common.progress_bar() as show:
            return evaluate(
                model,
                packed,
                contenders,
                budgets,
                length,
                seed=seed,
                recall=recall,
                resume_dir=work,
                progress=show,
                settings=settings,
            )
    except KeyboardInterrupt:
        kept = "nothing was kept" if work is None else f"what is finished is in {work}; the same command goes on there"
        print(f"kvkeep: stopped; {kept}", file=sys.stderr)
        raise


def show(result: dict[str, Any]) -> None:
    """Prints the tables and what they mean."""
    console = common.output()
    console.print(table(result, console.width))
    closed = gaps(result["rows"])
    if any(record["kind"] == "all" for record in closed):
        console.print(gap_table(closed))
    console.print(LEGEND)
    held = recall_table(result)
    if held is not None:
        console.print(held, RECALL_LEGEND)


def _equipped(contenders: Sequence[Contender], model: Any, drop: bool) -> list[Contender]:
    """Contenders with their scorers; those without one are dropped if `drop`, else an error."""
    found = []
    for contender in contenders:
        try:
            found.append(common.equipped(contender, model))
        except ValueError:
            if not drop:
                raise
    return found


def _texts(files: list[Path], kinds: str | None) -> list[Any]:
    wanted = None if kinds is None else common.names(kinds)
    if files:
        texts = documents.read(files)
    else:
        texts = documents.bundled() if wanted is None else documents.bundled(kinds=tuple(wanted))
    known = dict.fromkeys(document.kind for document in texts)
    for kind in wanted or []:
        if kind not in known:
            raise ValueError(f"no document is of kind {kind!r}; there are {', '.join(known)}")
    return [document for document in texts if wanted is None or document.kind in wanted]
