"""`kvkeep chat`: a conversation of any length on one bounded cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import typer

from kvkeep.cli import common
from kvkeep.cli.generate import Stream
from kvkeep.cli.session import Session

PLACE_OF_A_REPLY = "the-reply-stands-here"


def run(
    model: common.ModelFlag = common.DEFAULT_MODEL,
    max_new_tokens: common.NewTokensFlag = 256,
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
    """Talk to a model that has a fixed budget.

    The conversation may become as long as you like. /reset forgets everything, /exit ends.
    """
    chosen = common.generating_policy(policy, budget, sinks, window, interval, budget_at_rest, scorer, seed)
    language_model, tokenizer = common.load(model, dtype, device)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{model} has no chat template; `kvkeep generate` goes on from plain text")
    held = common.equipped(chosen, language_model).policy(budget)
    session = Session(language_model, tokenizer, held, prefill.value)
    torch.manual_seed(seed)
    for line in lines():
        if line == "/exit":
            break
        if line == "/reset":
            session.reset()
            typer.echo("[forgotten]")
            continue
        with Stream("reading") as stream:
            reply = session.write(turn(tokenizer, session.ids, line), max_new_tokens, temperature, stream)
        typer.echo(f"\n[{reply.summary()}]\n")


def lines() -> Iterator[str]:
    """What the user says, line by line without blanks; a prompt sign on a terminal only."""
    spoken = _typed() if sys.stdin.isatty() else common.standard_input()
    yield from filter(None, map(str.strip, spoken))


def _typed() -> Iterator[str]:
    import readline  # noqa: F401 - gives input() its editing and history

    typer.echo("/reset forgets everything, /exit ends")
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def turn(tokenizer: Any, before: list[int], message: str) -> list[int]:
    """The ids of one more user message, as the chat template sets it after a reply that is in the cache already.

    What the model wrote is never tokenised again: its own ids are what the cache holds.

    Args:
        tokenizer: with a chat template.
        before: the ids of the conversation so far, up to the last token of the reply; empty at the start.
        message: what the user says now.
    """
    user = {"role": "user", "content": message}
    if not before:
        return _ids(tokenizer, _render(tokenizer, [user]))
    earlier = [{"role": "user", "content": "-"}, {"role": "assistant", "content": PLACE_OF_A_REPLY}]
    after = _render(tokenizer, [*earlier, user]).rpartition(PLACE_OF_A_REPLY)[2]
    ids = _ids(tokenizer, after)
    if ids and before[-1] == ids[0] and before[-1] in tokenizer.all_special_ids:
        return ids[1:]  # the model has closed its reply itself
    return ids


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
