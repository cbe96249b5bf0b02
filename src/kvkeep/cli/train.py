"""`kvkeep train`: a scorer for your model, or a backbone used to a budget, from your documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep import scorers
from kvkeep.cli import common, foresight, tune
from kvkeep.cli.evaluate import DataFlag
from kvkeep.evaluation import documents
from kvkeep.training import foresightkv, kvpop
from kvkeep.training.student import TARGETS

METHODS = (*tune.METHODS, foresightkv.METHOD)
MethodArgument = Annotated[str, typer.Argument(metavar="METHOD", help=f"{', '.join(METHODS)}.")]
OutFlag = Annotated[Path, typer.Option("--out", metavar="DIR", help="The checkpoint; the run lives in DIR/run.")]
CountFlag = Annotated[int | None, typer.Option("--documents", min=2, help="At most so many, of all kinds in turn.")]
PresetFlag = Annotated[str, typer.Option("--preset", help=f"{', '.join(kvpop.PRESETS)}.")]
StepsFlag = Annotated[int | None, typer.Option("--steps", min=1, help="Of a tuned backbone (100), or of the scorer.")]
ShardsFlag = Annotated[
    Path | None, typer.Option("--shards", metavar="DIR", help="Where read documents are kept, to share between runs.")
]


def run(
    context: typer.Context,
    method: MethodArgument,
    out: OutFlag,
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files for --data.")] = None,
    model: common.ModelFlag = common.DEFAULT_MODEL,
    data: DataFlag = None,
    count: CountFlag = None,
    length: Annotated[int, typer.Option("--length", min=3, help="Tokens of every document.")] = 1024,
    budgets: Annotated[str, typer.Option("--budgets", help="Tokens per KV head, like 128,256.")] = "128,256",
    preset: PresetFlag = "best",
    steps: StepsFlag = None,
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="Width of the scoring network.")] = None,
    loss: Annotated[
        str | None,
        typer.Option("--loss", help="intensity, regression or boundary; of foresightkv ranking, regression, tweedie."),
    ] = None,
    decay: Annotated[str | None, typer.Option("--decay", help="fitted, calibrated, learned or off.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Target over a group: max, mean_log, log_mean.")] = None,
    delay: Annotated[bool, typer.Option(help="kvpop reads its memory when a token leaves, or when it enters.")] = True,
    features: Annotated[
        int | None, typer.Option("--features", min=1, help="Of kvpop's memory; as many as cost 8 % of the budget.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--start", metavar="DIR", help="kvpop begins as this kvpop_mlp scorer; a later --stage goes on."),
    ] = None,
    stage: foresight.StageFlag = None,
    inputs: foresight.InputsFlag = None,
    rollout: foresight.RolloutFlag = None,
    group_size: foresight.GroupSizeFlag = None,
    reward: foresight.RewardFlag = None,
    beta: foresight.BetaFlag = None,
    interval: common.IntervalFlag = None,
    at_rest: common.AtRestFlag = False,
    backbone: tune.BackboneFlag = tune.Backbone.frozen,
    scorer: tune.ScorerFlag = None,
    lr: tune.RateFlag = None,
    rank: tune.RankFlag = 16,
    targets: tune.TargetsFlag = ",".join(TARGETS),
    kl: tune.KLFlag = "tail",
    packing: tune.PackingFlag = tune.Packing.cut,
    checkpointing: tune.CheckpointingFlag = False,
    compute: tune.ComputeFlag = "own",
    train_scorer: tune.AlongFlag = False,
    shards: ShardsFlag = None,
    half: Annotated[bool, typer.Option("--half", help="Store a scorer's matrices in float16.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    dtype: common.DtypeFlag = None,
    device: common.DeviceFlag = None,
    seed: common.SeedFlag = 0,
) -> None:
    """Train a scorer on a frozen backbone, or tune the backbone under a policy.

    Frozen: reads every document once, fits the scorer to the attention that tokens receive later, for kvpop and
    kvpop_mlp chooses the decay by loss on a few of them, and saves a checkpoint for --scorer. With --backbone lora or
    full, the backbone then learns to predict under eviction what it predicts with the full cache; streaming is tuned
    without a scorer.
    Killed runs go on with --resume.
    """
    if method not in METHODS:
        raise ValueError(f"train takes {', '.join(METHODS[:-1])} or {METHODS[-1]}, not {method!r}")
    frozen, foreseeing = backbone == tune.Backbone.frozen, method == foresightkv.METHOD
    bounds = common.numbers(budgets, "--budgets")
    shared = {"seed": seed, "resume": resume, "base_model": model, "command": context.obj, "shards": shards}
    reinforced = {
        "--rollout": ("rollout", rollout),
        "--group-size": ("group", group_size),
        "--reward": ("variant", reward),
        "--beta": ("beta", beta),
    }
    tuning = trained = begun = None
    if foreseeing:
        foresight.require_its_own(context, frozen)
        recipe = foresight.settings(preset, steps, stage, inputs, hidden, loss, lr, reinforced)
        name, begun = foresight.start_from(stage, start)
        split = foresight.split(bounds, interval, at_rest)
    else:
        own = {"--stage": stage, "--inputs": inputs, "--interval": interval}
        own |= {flag: value for flag, (_, value) in reinforced.items()}
        for flag, given in own.items():
            if given is not None:
                raise ValueError(f"{flag} {foresight.ONLY_HERE}")
        if at_rest:
            raise ValueError(f"--budget-at-rest {foresight.ONLY_HERE}")
        recipe = kvpop.recipe(
            preset,
            steps if frozen else None,
            hidden=hidden,
            loss=loss,
            decay=decay,
            group=group,
            lr=lr if frozen else None,
            options=(({} if delay else {"delay": False}) | ({} if features is None else {"features": features}))
            or None,
        )
        given = {"lr": lr, "rank": rank, "kl": kl, "checkpointing": checkpointing, "compute": compute, "length": length}
        tuning = tune.settings(method, backbone, scorer, steps, targets, packing, train_scorer, **given)
        trained = tune.loaded_scorer(method, scorer, bounds)
        if start is not None and (method != "kvpop" or not frozen):
            raise ValueError("--start is for kvpop on a frozen backbone")
        begun = None if start is None else scorers.load_scorer(start)
    files = [*(data or []), *(more or [])]
    texts = documents.read(files) if files else documents.bundled(split="train")
    language_model, tokenizer = common.load(model, dtype, device)
    if method in kvpop.METHODS and trained is None:
        scorers.new(method, language_model.config, bounds)  # complains about budgets before anything slow
    whole = tuning is not None and tuning.packing != "cut"
    packed = tune.whole(texts, tokenizer) if whole else documents.pack(texts, tokenizer, length)
    packed = documents.in_turn(packed, count)
    if foreseeing:
        foresight.run(
            language_model, packed, out, budgets=split, settings=recipe, stage=name, start=begun, half=half, **shared
        )
        return
    if tuning is not None:
        tune.run(method, language_model, tokenizer, packed, bounds, out, tuning, trained, recipe, **shared)
        return
    with common.progress_bar() as progress:
        made = kvpop.train(
            method, language_model, packed, bounds, out, recipe, half=half, start=begun, progress=progress, **shared
        )
    report(made, len(packed), out)


def report(scorer: scorers.Scorer, count: int, out: Path) -> None:
    """What was learned, in a few lines."""
    metrics = scorer.metadata["metrics"]
    held_out = metrics["held_out"]
    if "loss" in held_out:
        value = {name: held_out[name]["value"] for name in ("loss", "recall", "chance") if name in held_out}
        low_high = "[{:.4f}, {:.4f}]".format(*held_out["loss"]["interval"])
        recall = f", recall {value['recall']:.2f} (by chance {value['chance']:.2f})" if "recall" in value else ""
        typer.echo(f"held-out loss {value['loss']:.4f} {low_high}{recall} over {held_out['documents']} documents")
    fitted = scorer.metadata["recipe"]["schedule"]["decay"] == "fitted"
    what = "fitted decays times" if fitted else f"decay per {scorer.decay_step} tokens"
    for held, ratios in metrics.get("calibration", {}).items():
        listed = ", ".join(f"{decay} {ratio:.4f}" for decay, ratio in ratios.items())
        typer.echo(f"loss ratio on training documents, {held} held, by {what}: {listed}")
    budgets = ", ".join(str(budget.slots + scorer.state_entries) for budget in scorer.budgets)
    typer.echo(f"{scorer.method} scorer for budgets {budgets}, from {count} documents, in {out}")
