"""`kvkeep generate`: one prompt, streamed, on a bounded cache."""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer
from rich.console import Console

from kvkeep.cli import common
from kvkeep.cli.session import Session

PromptArgument = Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")]


def run(
    prompt: PromptArgument = None,
    model: common.ModelFlag = common.DEFAULT_MODEL,
    max_new_tokens: common.NewTokensFlag = 128,
    temperature: common.TemperatureFlag = 0.0,
    policy: common.PolicyFlag = common.DEFAULT_POLICY,
    budget: common.BudgetFlag = common.DEFAULT_BUDGET,
    sinks: common.SinksFlag = None,
    window: common.WindowFlag = None,
    interval: common.IntervalFlag = None,
    budget_at_rest: common.AtRestFlag = False,
    scorer: common.ScorerFlag = None,
    prefill: common.PrefillFlag = common.Prefill.sparse,
    dtype: common.DtypeFlag = None,
    device: common.DeviceFlag = None,
    seed: common.SeedFlag = 0,
) -> None:
    """Go on from a prompt within a budget.

    Streams the text and ends with speed, cache bytes against the full cache, and evictions.
    """
    chosen = common.generating_policy(policy, budget, sinks, window, interval, budget_at_rest, scorer, seed)
    text = read_prompt(prompt)
    language_model, tokenizer = common.load(model, dtype, device)
    held = common.equipped(chosen, language_model).policy(budget)
    session = Session(language_model, tokenizer, held, prefill.value)
    torch.manual_seed(seed)
    with Stream("reading the prompt") as stream:
        reply = session.write(tokenizer(text)["input_ids"], max_new_tokens, temperature, stream)
    print(f"\n\n[{reply.summary()}]")


def read_prompt(prompt: str | None) -> str:
    """The prompt, or standard input.

    Raises:
        ValueError: if there is neither, or it is empty.
    """
    if prompt is None and sys.stdin.isatty():
        raise ValueError('give a prompt: kvkeep generate "Once upon a time"')
    text = "".join(common.standard_input()) if prompt in (None, "-") else prompt
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


class Stream:
    """Prints text as it comes; until the first piece, a spinner on a terminal says what is going on."""

    def __init__(self, waiting: str):
        self.spinner = Console(stderr=True).status(waiting)

    def __enter__(self) -> Stream:
        self.spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.spinner.stop()

    def __call__(self, text: str) -> None:
        self.spinner.stop()
        print(text, end="", flush=True)
