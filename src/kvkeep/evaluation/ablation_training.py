"""The trainings of an ablation: what decides each scorer, made or found, and what is watched besides its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from kvkeep import scorers
from kvkeep.evaluation import documents
from kvkeep.evaluation.ablation_variants import Experiment, Variant
from kvkeep.evaluation.store import key
from kvkeep.lifetimes import chance_recall, recall
from kvkeep.training import foresightkv, kvpop
from kvkeep.training.corpus import Texts, data_fingerprint
from kvkeep.training.harvest import harvest
from kvkeep.training.rank import overlap, spaced
from kvkeep.training.state import jsonable
from kvkeep.training.traces import harvest as harvest_traces

Told = Callable[[str, int, int], None]


def require_trainable(experiment: Experiment, model: PreTrainedModel, train: Texts, test: Texts) -> None:
    """Raise ValueError where a variant cannot be trained on the documents, or made for the model and budget."""
    experiment.check()
    if min(len(train), len(test)) < 2:
        raise ValueError(
            f"an ablation takes two documents or more to train on, and as many held out, not {len(train)}, {len(test)}"
        )
    for document, ids in (*train, *test):
        if ids.numel() != experiment.length:
            raise ValueError(f"document {document.name!r} has {ids.numel()} tokens, not {experiment.length}")
    for variant in experiment.variants:
        if variant.documents is not None and variant.documents >= len(train):
            raise ValueError(
                f"variant {variant.name!r} trains on {variant.documents} of the training documents, but there are only "
                f"{len(train)} of {experiment.length} tokens"
            )
        recipe = variant.recipe(experiment.steps, experiment.calibrate_on)
        options = ({} if variant.foreseeing else {"hidden": recipe.hidden}) | recipe.options
        scorers.new(variant.method, model.config, [experiment.budget], **options)


def place(experiment: Experiment, variant: Variant, seed: int, model: PreTrainedModel, train: Texts) -> str:
    """The folder of a variant's scorer: a name made of all that decides it, not of the question that asked for it."""
    decides = {
        "method": variant.method,
        "stage": variant.stage,
        "recipe": jsonable(asdict(variant.recipe(experiment.steps, experiment.calibrate_on))),
        "budget": experiment.budget,
        "model": scorers.model_fingerprint(model),
        "data": data_fingerprint(documents.in_turn(train, variant.documents)),
    }
    return f"{variant.method}-{key(**decides)[:16]}-{seed}"


def trained(
    experiment: Experiment,
    variant: Variant,
    seed: int,
    model: PreTrainedModel,
    train: Texts,
    out: Path,
    shards: Path,
    told: Told,
) -> tuple[scorers.Scorer, str]:
    """The scorer of a variant and seed, trained unless its checkpoint is there; and the name of its folder in OUT."""
    name = place(experiment, variant, seed, model, train)
    folder = out / name
    if not (folder / "config.json").exists():
        recipe = variant.recipe(experiment.steps, experiment.calibrate_on)
        shared = {
            "seed": seed,
            "resume": True,
            "base_model": experiment.model,
            "shards": shards,
            "progress": lambda stage, done, total: told(f"{variant.title(seed)}: {stage}", done, total),
        }
        given = (model, documents.in_turn(train, variant.documents), [experiment.budget], folder, recipe)
        if not variant.foreseeing:
            kvpop.train(variant.method, *given, **shared)
        elif variant.stage == "sft":
            foresightkv.train(*given, **shared)
        else:
            start, _ = trained(experiment, variant.supervised(), seed, model, train, out, shards, told)
            foresightkv.train(*given, stage=variant.stage, start=start, **shared)
    return scorers.load_scorer(folder), name


@torch.no_grad()
def monitor(model: PreTrainedModel, scorer: scorers.Scorer, test: Texts, shards: Path) -> tuple[float, float]:
    """What is watched besides the loss, and what chance would give: mean over layers and held-out documents.

    Of KVpop the recall of the undecayed teacher's top-k by the undecayed scores; the teacher is the same for all
    variants, the largest attention of a group's heads, whatever they were trained on. Of ForesightKV the overlap of
    what goes with what golden drops, along golden's evictions.
    """
    budget, found = scorer.budgets[0], []
    if scorer.method == foresightkv.METHOD:
        rotary = foresightkv.rotaries(model, scorer)
        traces = harvest_traces(model, test, [budget], shards, scorer.layer(scorer.geometry[0].index).features)
        for trace in traces:
            chosen = spaced(trace)
            for shape in scorer.geometry:
                layer, group = scorer.layer(shape.index), shape.query_heads // shape.kv_heads
                keep = layer.keep(trace.features(shape.index, group, layer.features, chosen, rotary[shape.index]))
                found.append(float(overlap(keep, trace.alpha(shape.index, chosen), budget.interval)))
        return float(np.mean(found)), budget.interval / (budget.slots - budget.window - budget.sinks)
    pieces = harvest(model, test, budget.window, shards)
    for piece in pieces:
        for shape in scorer.geometry:
            keys, values, target = piece.layer(shape.index)
            score = scorer(shape.index, keys, values, budget.window).float()
            found.append(float(recall(target, score, budget).mean()))
    return float(np.mean(found)), float(np.mean([chance_recall(piece.length, budget) for piece in pieces]))
