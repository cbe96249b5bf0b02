"""`kvkeep train`: a scorer for your model, or a backbone used to a budget, from your documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep import scorers
from kvkeep.cli import common, foresight, train_flags, tune
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
PatienceFlag = Annotated[
    int | None,
    typer.Option("--patience", min=0, help="Evaluations without improvement that end a scorer's run; 0: never."),
]
EvaluateFlag = Annotated[
    int | None, typer.Option("--evaluate-every", min=1, help="Steps between two held-out evaluations.")
]
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
    patience: PatienceFlag = None,
    evaluate_every: EvaluateFlag = None,
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="Width of the scoring network.")] = None,
    loss: Annotated[
        str | None,
        typer.Option("--loss", help="intensity, regression or boundary; of foresightkv ranking, regression, tweedie."),
    ] = None,
    decay: Annotated[str | None, typer.Option("--decay", help="fitted, calibrated, learned or off.")] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", help="Target over a group: max, mean_log, log_mean; of foresightkv max or mean."),
    ] = None,
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
    follow: foresight.FollowFlag = None,
    restart: foresight.RestartFlag = False,
    rollout: foresight.RolloutFlag = None,
    group_size: foresight.GroupSizeFlag = None,
    reward: foresight.RewardFlag = None,
    beta: foresight.BetaFlag = None,
    interval: common.IntervalFlag = None,
    window: common.WindowFlag = None,
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
    asked = train_flags.Asked(method, backbone.value, scorer is not None, "sft" if stage is None else stage.value)
    train_flags.require_meant(context, asked)
    train_flags.require_rate(lr)
    bounds = common.numbers(budgets, "--budgets")
    timing = {"evaluate_every": evaluate_every}
    fitted = {"hidden": hidden, "loss": loss, "patience": patience} | timing
    if asked.foresees:
        fitted |= {"lr": lr, "follow": follow, "head_reduce": group, "restart": restart}
        fitted |= {"rollout": rollout, "group": group_size, "variant": reward, "beta": beta}
        job = foresight.job(bounds, interval, window, at_rest, preset, steps, asked.stage, start, inputs, fitted)
    else:
        fitted |= {"decay": decay, "group": group, "options": _memory(delay, features)}
        if asked.tuned:
            chosen = {"kl": kl, "packing": packing.value, "checkpointing": checkpointing, "compute": compute}
            chosen |= {"rank": rank, "targets": tuple(common.names(targets)), "train_scorer": train_scorer}
            chosen |= {"backbone": asked.backbone, "length": length, "steps": steps, "lr": lr} | timing
            job = tune.job(method, bounds, scorer, kvpop.recipe(preset, **fitted), chosen)
        else:
            begun = None if start is None else scorers.load_scorer(start)
            job = partial(fit, method, bounds, kvpop.recipe(preset, steps, lr=lr, **fitted), begun)
    files = [*(data or []), *(more or [])]
    texts = documents.read(files) if files else documents.bundled(split="train")
    language_model, tokenizer = common.load(model, dtype, device)
    if method in kvpop.METHODS and scorer is None:
        scorers.new(method, language_model.config, bounds)  # complains about budgets before anything slow
    whole = asked.tuned and packing != tune.Packing.cut
    packed = tune.whole(texts, tokenizer) if whole else documents.pack(texts, tokenizer, length)
    if not whole:
        common.tell_skipped(packed, length)
    options = {"seed": seed, "resume": resume, "base_model": model, "shards": shards, "half": half}
    options |= {"command": train_flags.recorded(context.obj)} | ({"tokenizer": tokenizer} if asked.tuned else {})
    job(language_model, documents.in_turn(packed, count), out, **options)
    tell_what_stays(out)


def _memory(delay: bool, features: int | None) -> dict[str, Any] | None:
    """Options of kvpop's memory that are not its defaults; None where all are."""
    return (({} if delay else {"delay": False}) | ({} if features is None else {"features": features})) or None


def fit(
    method: str,
    bounds: Sequence[int],
    recipe: kvpop.Recipe,
    start: scorers.Scorer | None,
    language_model: Any,
    packed: Sequence[Any],
    out: Path,
    **options: Any,
) -> None:
    """Train a scorer on a frozen backbone and say what was learned."""
    with common.progress_bar() as progress:
        made = kvpop.train(
            method, language_model, packed, bounds, out, recipe, start=start, progress=progress, **options
        )
    report(made, len(packed), out)


def tell_what_stays(out: Path) -> None:
    """Where the documents as read are, if they are in the run's own folders, and how much room they take."""
    folders = [
        folder for folder in (out / "run" / "shards", tune.scorer_folder(out) / "run" / "shards") if folder.exists()
    ]
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    if size:
        shown = f"{size / 1e6:.1f} MB" if size < 1e8 else f"{size / 1e9:.1f} GB"
        where = " and ".join(map(str, folders))
        typer.echo(f"documents as read are in {where} ({shown}): needed for --resume only")


def report(scorer: scorers.Scorer, count: int, out: Path) -> None:
    """What was learned, in a few lines."""
    metrics = scorer.metadata["metrics"]
    held_out = metrics["held_out"]
    if "loss" in held_out:
        value = {name: held_out[name]["value"] for name in ("loss", "recall", "chance") if name in held_out}
        low_high = common.interval_over(held_out["documents"], held_out["loss"]["interval"], ".4f")
        recall = f", recall {value['recall']:.2f} (by chance {value['chance']:.2f})" if "recall" in value else ""
        typer.echo(f"held-out loss {value['loss']:.4f}{low_high}{recall} over {held_out['documents']} documents")
    fitted = scorer.metadata["recipe"]["schedule"]["decay"] == "fitted"
    what = "fitted decays times" if fitted else f"decay per {scorer.decay_step} tokens"
    for held, ratios in metrics.get("calibration", {}).items():
        listed = ", ".join(f"{decay} {ratio:.4f}" for decay, ratio in ratios.items())
        typer.echo(f"loss ratio on training documents, {held} held, by {what}: {listed}")
    budgets = ", ".join(str(budget.slots + scorer.state_entries) for budget in scorer.budgets)
    typer.echo(f"{scorer.method} scorer for budgets {budgets}, from {count} documents, in {out}")
