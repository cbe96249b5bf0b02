"""`kvkeep demo`: the embedded model with and without a budget, then rules, trained scorers and an oracle measured."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep import policies
from kvkeep.cli import common
from kvkeep.cli.evaluate import LEGEND, measured
from kvkeep.cli.session import Session
from kvkeep.evaluation import documents
from kvkeep.evaluation.contenders import Contender, line_up
from kvkeep.evaluation.table import by_kind, table
from kvkeep.runtime.heap import keep_freed_memory

BUDGET = 128
HALF = 160  # of the prompt, side by side; at 128 the trained scorers forget the name too
SIDE_BY_SIDE = ("full", "streaming", "kvpop_mlp")
NEW_TOKENS = 24
FACT = "Marta has a black cat. Her cat is called Pepper, and her dog is called Bruno."
QUESTION = "Marta's black cat is called"
PAGE_CHARACTERS = 1400  # of a novel, between the fact and the question

MEASURED = ("full", "random", "streaming", "tova", "h2o", "h2o_decayed", "snapkv", "rkv", "expected_attention")
LEARNED = ("kvpop_mlp", "kvpop", "foresightkv")  # with the scorers that come with the package
ORACLE = "golden"
LENGTH = 512
DOCUMENTS = 4  # one of each kind


def run(seed: common.SeedFlag = 0) -> None:
    """Watch a small model remember and forget.

    Then see what every policy costs on four documents. Takes two to three minutes on two cores.
    """
    console = common.output()
    keep_freed_memory()
    model, tokenizer = common.load(common.DEFAULT_MODEL)
    _side_by_side(console, model, tokenizer)
    texts = documents.bundled(split="demo")
    packed = documents.in_turn(documents.pack(texts, tokenizer, LENGTH), DOCUMENTS)
    console.print(
        f"\nWhat does forgetting cost? The model reads {len(packed)} documents of {LENGTH} tokens as if it wrote them, "
        f"holding {BUDGET}."
    )
    contenders = [common.equipped(one, model) for one in line_up([*MEASURED, *LEARNED, ORACLE], seed=seed)]
    result = measured(model, packed, contenders, [BUDGET], LENGTH, seed, None, {"model": common.DEFAULT_MODEL})
    everything = {"rows": [row for row in result["rows"] if row["kind"] == "all"]}
    console.print(table(everything, console.width), by_kind(result, BUDGET), LEGEND)


def prompt() -> str:
    """A fact, a page of a novel, and a question about the fact."""
    novel = documents.bundled(("prose",), split="demo")[0].text
    page = novel[:PAGE_CHARACTERS].rpartition(". ")[0] + "."
    return f"{FACT}\n\n{page}\n\n{QUESTION}"


def _side_by_side(console: Console, model: Any, tokenizer: Any) -> None:
    """The same prompt under every policy of `SIDE_BY_SIDE`, one column each."""
    ids = tokenizer(prompt())["input_ids"]
    console.print(f"{common.DEFAULT_MODEL} reads {len(ids)} tokens and goes on:\n")
    console.print(Text(f"  {FACT}\n  [a page of a novel]\n  {QUESTION} ...", style="italic"))
    columns = Table(box=box.SIMPLE_HEAD, show_edge=False, expand=True)
    texts, costs = [], []
    scorers = {name: common.equipped(Contender(name), model).scorer for name in SIDE_BY_SIDE}
    with common.progress_bar() as progress:
        for done, name in enumerate(SIDE_BY_SIDE):
            progress(f"generating, {name}", done, len(SIDE_BY_SIDE))
            policy = policies.create(name, None if name == "full" else HALF, scorer=scorers.get(name))
            reply = Session(model, tokenizer, policy).write(list(ids), NEW_TOKENS)
            columns.add_column("full cache" if name == "full" else f"{name}, {HALF} tokens", ratio=1)
            texts.append(Text(f"...{reply.text}"))
            costs.append(Text(reply.summary(), style="dim"))
    columns.add_row(*texts)
    columns.add_row()
    columns.add_row(*costs)
    console.print()
    console.print(columns)
