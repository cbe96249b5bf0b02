"""Tuning a backbone: what learns and what does not, resumption, adapters, what is left behind, refusals."""

from __future__ import annotations

import copy
import json
import math
import sys

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

import kvkeep
from kvkeep.policies.full import Full
from kvkeep.runtime import models
from kvkeep.runtime.replay import hidden_states
from kvkeep.scorers import model_fingerprint
from kvkeep.training.rows import pack_rows
from kvkeep.training.student import FullStudent, LoraStudent
from kvkeep.training.teacher import predictions
from kvkeep.training.tune import Settings, Tuning, tune
from test_training import texts
from tiny import tiny_model

BUDGETS = [kvkeep.Budget(2, 4, 10), kvkeep.Budget(2, 4, 20)]
SMALL = {"steps": 6, "rank": 4, "evaluate_every": 3, "save_every": 2}


def small(**changes):
    return Settings(**SMALL | changes)


def scorer_for(model, method, scale=1.0):
    """One that decides something: fresh scorers keep the newest."""
    scorer = kvkeep.scorers.new(method, model.config, BUDGETS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in scorer.parameters():
            weight += scale * 0.3 * torch.randn(weight.shape, generator=generator)
    return scorer


def arguments(model, method="kvpop_mlp", documents=None):
    scorer = None if method in ("streaming", "random") else scorer_for(model, method)
    return {"policy_name": method, "documents": documents or texts(5), "budgets": BUDGETS, "scorer": scorer}


def tuning(model, folder, method="kvpop_mlp", student=None, rows=None, budgets=BUDGETS, **changes):
    """A run that is set up but not run."""
    settings = small(**{"backbone": "full", "held_out": 0.0} | changes)
    scorer = arguments(model, method)["scorer"]
    plan = [kvkeep.policies.create(method, budget, scorer=scorer) for budget in budgets]
    rows = pack_rows(texts(3), settings.packing, settings.length) if rows is None else rows
    shards = [predictions(model, row.pieces, folder / "shards", settings.top, settings.compute) for row in rows]
    lessons = [list(zip(row.pieces, shard, strict=True)) for row, shard in zip(rows, shards, strict=True)]
    return Tuning(student or FullStudent(model), plan, lessons, settings, folder, scorer)


def gradients(student):
    return [None if weight.grad is None else weight.grad.clone() for weight in student.parameters]


@pytest.fixture
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def folder_model(folder):
    """The byte-level model of the command line, which has a place on the disk."""
    loaded, _ = models.load(str(folder))
    return loaded.requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------------
# What learns


@pytest.mark.parametrize("backbone", ["lora", "full"])
@pytest.mark.parametrize("kl", ["tail", "renorm"])
def test_untouched_student_that_evicts_nothing_agrees_with_its_teacher(tmp_path, backbone, kl):
    model = tiny_model()
    student = LoraStudent(model, rank=4) if backbone == "lora" else FullStudent(model)
    run = tuning(model, tmp_path, "streaming", student, budgets=[kvkeep.Budget(2, 4, 64)], kl=kl, top=20)
    record = run.gradients(run.train[0], run.plan[0])
    assert abs(record["kl"]) <= 1e-14
    assert max(float(grad.abs().max()) for grad in gradients(student) if grad is not None) <= 1e-12
    assert "keep_rate" not in record
    evicting = tuning(model, tmp_path, "streaming", student, kl=kl, top=20)
    assert evicting.gradients(evicting.train[0], evicting.plan[0])["kl"] > 1e-3


@pytest.mark.parametrize("method", ["kvpop_mlp", "kvpop"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("loss", ["boundary", "regression"])
def test_the_two_gradients_never_meet(model, tmp_path, method, checkpointing, loss):
    """Spec kvpop 12.12: the score loss reaches only the scorer, the KL only the backbone."""
    changes = {"train_scorer": True, "checkpointing": checkpointing, "score_loss": loss}
    both = tuning(model, tmp_path, method, **changes)
    record = both.gradients(both.train[0], both.plan[0])
    assert record["score_loss"] > 0
    backbone = gradients(both.student)
    scorer = [weight.grad.clone() for weight in both.scorer.parameters()]
    assert any(grad.abs().max() > 0 for grad in scorer)

    both.model.zero_grad()
    alone = tuning(model, tmp_path, method, student=both.student, checkpointing=checkpointing)
    alone.gradients(alone.train[0], alone.plan[0])
    assert all(torch.equal(a, b) for a, b in zip(backbone, gradients(alone.student), strict=True))
    assert all(weight.grad is None for weight in alone.plan[0].scorer.parameters())

    both.model.zero_grad()
    both.scorer.zero_grad()
    both.divergence = lambda piece, *rest: (
        hidden_states(model, piece[None], both.plan[0], gradients=True, observe=rest[2])[0].sum() * 0,
        [],
    )
    both.gradients(both.train[0], both.plan[0])
    assert all(float(grad.abs().max()) == 0 for grad in gradients(both.student) if grad is not None)
    assert all(torch.equal(a, b.grad) for a, b in zip(scorer, both.scorer.parameters(), strict=True))


@pytest.mark.parametrize("method", ["streaming", "random", "kvpop_mlp", "kvpop"])
@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_tuning_lowers_the_divergence(model, tmp_path, method, backbone):
    """Streaming without a scorer is StreamLLM+. Random ids teach nothing of other random ids, so it is on its own."""
    settings = Settings(backbone=backbone, steps=32, rank=8, lr=3e-3, held_out=0.3, evaluate_every=10)
    record = tune(model, out=tmp_path, settings=settings, **arguments(model, method, texts(3)))
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(33))
    assert sum(line["kl"] for line in log[-5:-1]) < 0.85 * sum(line["kl"] for line in log[:4])
    assert log[-1] == {"step": 32} | record["metrics"]
    assert log[0]["held_out_kl"] == record["metrics"]["held_out_kl_before"] != record["metrics"]["held_out_kl"]
    assert {"kl", "tokens", "tokens_per_second", "backbone_gradient_norm", "backbone_lr", "budget"} <= set(log[0])
    memory = record["state_entries"]
    assert (memory > 0) == (method == "kvpop")
    assert {line["budget"] for line in log[:2]} == {16 + memory, 26 + memory}
    assert [line["step"] for line in log if "held_out_kl" in line] == [0, 10, 20, 30, 32]
    rate = log[0]["keep_rate"]
    assert 0 <= rate["lowest_head"] <= rate["mean"] <= rate["highest_head"] <= 1
    assert (rate["mean"] == 1) == (method == "streaming")
    assert [len(heads) for heads in rate["layers"].values()] == [2, 2]
    heads = [each for heads in rate["layers"].values() for each in heads]
    assert (min(heads), max(heads)) == (rate["lowest_head"], rate["highest_head"])
    assert sum(heads) / 4 == pytest.approx(rate["mean"], abs=1e-4)
    assert "gamma" not in log[0]
    assert json.loads((tmp_path / "tune.json").read_text()) == record
    assert (tmp_path / "scorer").exists() == (method in ("kvpop", "kvpop_mlp"))


def test_scorer_learns_along_when_told_to(model, tmp_path):
    given = arguments(model)
    before = given["scorer"].fingerprint()
    tune(model, out=tmp_path / "still", settings=small(), **given)
    assert given["scorer"].fingerprint() == before == kvkeep.load_scorer(tmp_path / "still" / "scorer").fingerprint()
    tune(model, out=tmp_path / "along", settings=small(train_scorer=True), **given)
    learned = kvkeep.load_scorer(tmp_path / "along" / "scorer")
    assert learned.fingerprint() == given["scorer"].fingerprint() != before
    log = [json.loads(line) for line in (tmp_path / "along" / "run" / "log.jsonl").read_text().splitlines()]
    assert {"score_loss", "scorer_lr", "scorer_gradient_norm"} <= set(log[0])
    assert log[5]["scorer_lr"] != log[0]["scorer_lr"]
    assert log[5]["backbone_lr"] == log[0]["backbone_lr"]
    assert log[0]["gamma"] == {"0": 1.0, "1": 1.0}, "a fresh scorer forgets nothing"


def test_log_tells_how_a_scorer_that_learns_forgets(model, tmp_path):
    given = arguments(model)
    given["scorer"].set_decay({0: torch.tensor([-0.1, -0.3]), 1: 0.0})
    given["scorer"].decay_factors = {16: 2.0, 26: 1.0}
    tune(model, out=tmp_path, settings=small(train_scorer=True, steps=2), **given)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    means = {rest: sum(math.exp(factor * rate) for rate in (-0.1, -0.3)) / 2 for rest, factor in ((16, 2), (26, 1))}
    for line in log[:2]:
        assert line["gamma"] == {"0": pytest.approx(means[line["budget"]], abs=1e-4), "1": 1.0}


def test_bfloat16_compute_keeps_scores_and_losses_in_float32(model, tmp_path, monkeypatch):
    dtypes = set()
    original = kvkeep.policies.REGISTRY["kvpop"].priority

    def priority(self, step):
        score = original(self, step)
        dtypes.add(score.dtype)
        return score

    monkeypatch.setattr(kvkeep.policies.REGISTRY["kvpop"], "priority", priority)
    results = []
    for compute in ("own", "bfloat16"):
        for checkpointing in (False, True):
            run = tuning(model, tmp_path, "kvpop", compute=compute, checkpointing=checkpointing)
            model.zero_grad()
            results.append((run.gradients(run.train[0], run.plan[0])["kl"], gradients(run.student)))
    assert dtypes == {torch.float32}
    assert all(grad.dtype == torch.float32 for _, grads in results for grad in grads)
    (exact, _), _, (rounded, grads), (again, regained) = results
    assert rounded == again
    assert all(torch.equal(a, b) for a, b in zip(grads, regained, strict=True))
    assert rounded == pytest.approx(exact, rel=0.3)
    assert rounded != exact


# ---------------------------------------------------------------------------------------------------------------------
# What is left behind


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_the_model_is_left_as_it_was_apart_from_tuned_weights(model, tmp_path, backbone):
    model.set_attn_implementation("sdpa")
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)

    def looks(module):
        flags = [(name, weight.requires_grad, weight.grad) for name, weight in module.named_parameters()]
        parts = [(name, type(part), sorted(vars(part)), part.training) for name, part in module.named_modules()]
        return flags, parts, module.config.to_dict(), module.config._attn_implementation

    before, weights = looks(model), copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    tune(model, out=tmp_path, settings=small(backbone=backbone, checkpointing=True), **arguments(model))
    assert looks(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    same = [torch.equal(model.state_dict()[name], weight) for name, weight in weights.items()]
    assert all(same) if backbone == "lora" else not any(same)


@pytest.mark.parametrize("backbone", ["lora", "full"])
@pytest.mark.parametrize("method", ["streaming", "kvpop"])
def test_a_saved_student_predicts_what_it_learned(folder, folder_model, tmp_path, backbone, method):
    _, tokenizer = models.load(str(folder))
    given = arguments(folder_model, method) | {"base_model": str(folder), "tokenizer": tokenizer}
    record = tune(folder_model, out=tmp_path, settings=small(backbone=backbone, held_out=0.2), **given)
    loaded, tokenizer = models.load(str(tmp_path))
    assert type(loaded) is type(folder_model)
    assert tokenizer.padding_side == "left"
    assert not any("lora" in name for name, _ in loaded.named_modules())
    assert model_fingerprint(loaded) == record["tuned_fingerprint"] != record["base_fingerprint"]
    scorer = None
    if method == "kvpop":
        scorer = kvkeep.load_scorer(tmp_path / "scorer")
        scorer.require_fits(loaded.config, model_fingerprint(loaded))
        assert scorer.metadata["league"] == f"tuned backbone ({backbone})"
        tuned = scorer.metadata["tuned"]
        assert tuned["scorer_trained_on"] == "the untuned backbone"
        assert tuned["base_fingerprint"] == record["base_fingerprint"]
        assert tuned["scorer"] == record["scorer"] == given["scorer"].fingerprint()
    (held_out,) = [ids for index, (_, ids) in enumerate(texts(5)) if index == 2]
    teacher = kvkeep.replay(models.load(str(folder))[0], held_out[None], Full(), return_logits=True).logits
    teacher = kvkeep.training.losses.top_logits(teacher, 256)
    kls = []
    for budget in BUDGETS:
        policy = kvkeep.policies.create(method, budget, scorer=scorer)
        logits = kvkeep.replay(loaded, held_out[None], policy, return_logits=True).logits
        kls.append(float(kvkeep.training.losses.distillation(logits, teacher)))
    assert sum(kls) / 2 == pytest.approx(record["metrics"]["held_out_kl"], rel=1e-3)
    assert models.load(str(tmp_path), dtype="bfloat16")[0].dtype == torch.bfloat16


class Killed(Exception):
    pass


def killer(at):
    def progress(stage, done, total):
        if (stage, done) == ("tune", at):
            raise Killed

    return progress


@pytest.mark.parametrize("changes", [{}, {"backbone": "full", "schedule": "cosine"}, {"train_scorer": True}], ids=str)
def test_resumed_run_is_the_uninterrupted_one(tmp_path, changes):
    settings = small(**{"steps": 7} | changes)

    def run(out, **options):
        model = tiny_model(dtype=torch.float32)
        given = arguments(model) | {"shards": tmp_path / "shards"}
        record = tune(model, out=tmp_path / out, settings=settings, **given, **options)
        return record, given["scorer"].fingerprint()

    straight = run("straight")
    for end in (1, 2, 5, 6):
        with pytest.raises(Killed):
            run("killed", resume=True, progress=killer(end))
    assert run("killed", resume=True) == straight
    logs = []
    for out in ("straight", "killed"):
        lines = (tmp_path / out / "run" / "log.jsonl").read_text().splitlines()
        logs.append([{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines])
    assert logs[0] == logs[1]
    assert len(logs[0]) == 8
    assert run("killed", resume=True) == straight, "a finished run is no longer what it was"
    with pytest.raises(ValueError, match="holds a run already: give --resume"):
        run("killed")


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


MISTAKES = [
    ({"policy_name": "h2o"}, {}, "policy 'h2o' writes its slots in place and has no gradients"),
    ({"policy_name": "future_mass"}, {}, "policy 'future_mass' is an oracle"),
    ({"policy_name": "golden"}, {}, "policy 'golden' is an oracle"),
    ({"policy_name": "full"}, {}, "policy 'full' evicts nothing"),
    ({"policy_name": "kvpop", "scorer": None}, {}, "needs a scorer: train one"),
    ({"policy_name": "kvpop"}, {}, "not one for 'kvpop_mlp'"),
    ({"policy_name": "streaming", "scorer": None}, {"train_scorer": True}, "no scorer that could learn along"),
    ({"budgets": []}, {}, "one budget or more"),
    ({"documents": texts(1)}, {}, "two rows of tokens or more"),
    ({"documents": texts(3, 20)}, {}, "no text is longer than the budget of 26 tokens"),
    (
        {},
        {"targets": ("nope", "q_proj", "key")},
        "targets nope, key match no linear layer of LlamaForCausalLM, which has",
    ),
    ({}, {"targets": ("embed_tokens",)}, "targets embed_tokens match no linear layer"),
    ({"scorer": "of another model"}, {}, "this kvpop_mlp scorer does not fit the model: trained on weights with"),
    ({}, {"packing": "concat"}, "packing 'concat' needs the length of a row"),
    ({}, {"packing": "tight"}, "packing is one of cut, concat, reset, not 'tight'"),
]


@pytest.mark.parametrize(("call", "changes", "sentence"), MISTAKES, ids=[sentence for *_, sentence in MISTAKES])
def test_mistakes_are_one_sentence_and_write_nothing(model, tmp_path, call, changes, sentence):
    if call.get("scorer") == "of another model":
        call = {"scorer": scorer_for(model, "kvpop_mlp")}
        call["scorer"].metadata["base_fingerprint"] = model_fingerprint(tiny_model(seed=1))
    with pytest.raises(ValueError, match=sentence) as error:
        tune(model, out=tmp_path / "out", settings=small(**changes), **arguments(model) | call)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"backbone": "half"}, "backbone is one of lora, full, not 'half'"),
        ({"kl": "reverse"}, "kl is one of"),
        ({"compute": "int8"}, "compute is one of"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"lr": float("nan")}, "lr must be a finite number above 0, not nan"),
        ({"scorer_lr": 0.0}, "scorer_lr must be a finite number above 0, not 0.0"),
        ({"targets": ()}, "targets must name at least one linear layer"),
    ],
)
def test_settings_that_do_not_exist(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        small(**changes)


def test_targets_are_names_of_linear_layers_as_peft_reads_them(model):
    weights = copy.deepcopy(model.state_dict())
    student = LoraStudent(model, rank=2, targets=("self_attn.q_proj", "layers.1.mlp.up_proj"))
    assert len(student.names) == 2 * (2 + 1)
    student.release()
    with pytest.raises(ValueError, match="targets proj match no linear layer"):
        LoraStudent(model, targets=("proj",))
    assert list(model.state_dict()) == list(weights)


def test_a_fused_layer_is_not_left_out_silently():
    """Phi-3 has no q_proj: of the usual targets only o_proj would have got an adapter."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Phi3ForCausalLM(Phi3Config(vocab_size=61, pad_token_id=0, **sizes))
    layers = "o_proj, qkv_proj, gate_up_proj, down_proj, lm_head"
    sentence = f"targets q_proj, k_proj, v_proj match no linear layer of Phi3ForCausalLM, which has {layers}"
    with pytest.raises(ValueError, match=sentence):
        LoraStudent(model)
    assert LoraStudent(model, targets=("qkv_proj", "o_proj")).names


def test_missing_peft_is_one_sentence(model, folder, tmp_path, monkeypatch, run):
    tune(model, out=tmp_path / "out", settings=small(steps=1), **arguments(model))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs peft, which the extra `train` brings: pip install 'kvkeep\[train\]'"):
        tune(model, out=tmp_path / "other", settings=small(), **arguments(model))
    assert not (tmp_path / "other").exists()
    config = tmp_path / "out" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(folder)}))
    with pytest.raises(models.ModelError, match=r"holds adapters, which need peft.*kvkeep\[train\]"):
        models.load(str(tmp_path / "out"))
    code, _, err = run("train", "streaming", "--backbone", "lora", "--out", tmp_path / "third")
    assert (code, err.count("\n")) == (2, 1)
    assert "needs peft" in err


def test_adapters_without_a_base_are_refused(model, tmp_path):
    tune(model, out=tmp_path, settings=small(steps=1), **arguments(model))
    with pytest.raises(models.ModelError, match="does not say which model its adapters are for"):
        models.load(str(tmp_path))
