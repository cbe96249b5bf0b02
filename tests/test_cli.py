"""What the commands print, what they refuse and how, on a tiny byte-level model."""

import inspect
import json
import re

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import kvkeep
from kvkeep.cli import chat, common, main
from kvkeep.cli.session import Session
from kvkeep.runtime.cache import cache_keyword
from tiny import HANDED

# What the oldest supported transformers can do: an entry policy, and a long prompt at once.
RULE = "h2o" if HANDED else "random"
BUDGET = ("--policy", RULE, "--budget", "40", *(() if HANDED else ("--prefill", "dense")))


COMMANDS = ("generate", "chat", "train", "evaluate", "benchmark", "policies", "models", "demo", "serve")


@pytest.fixture(scope="session")
def loaded(folder):
    return common.load(str(folder), common.Dtype.float32)


# Lists and help


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert re.search(rf"^\s+{command}\s", out, re.MULTILINE)
    assert run() == (0, out, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"kvkeep {command}" in out


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_common_flags(run, command):
    _, out, _ = run(command, "--help")
    flags = "--model --policy --budget --sinks --window --interval --budget-at-rest --scorer --prefill --dtype --seed"
    assert set(flags.split()) <= set(re.findall(r"--[a-z-]+", out))


def test_version(run):
    assert run("--version") == (0, f"kvkeep {kvkeep.__version__}\n", "")


def test_policies_lists_every_one_with_its_split_and_paper(run):
    code, out, _ = run("policies", "--budget", "128")
    assert code == 0
    for name in kvkeep.policies.names():
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        split = kvkeep.policies.budget(name, 128)
        parts = "everything" if name == "full" else f"{split.sinks} + {split.window} + {split.topk}"
        assert parts in line
    assert out.count("oracle") >= 2
    assert "2602.03203" in out


def test_models_lists_the_alias(run):
    code, out, _ = run("models")
    assert code == 0
    assert "smollm2-135m" in out


# Mistakes: one line, exit code 2, nothing slow and nothing written before


GENERATING = [
    (["--policy", "streming"], "did you mean 'streaming'"),
    (["--policy", "golden"], "is an oracle"),
    (["--policy", "streaming", "--budget", "36"], "36 .*above sinks 4 .* window 32"),
    (["--policy", "streaming", "--budget", "0"], "--budget"),
    (["--policy", "streaming", "--interval", "4"], "interval"),
    (["--sinks", "-1"], "--sinks"),
    (["--dtype", "int3"], "--dtype"),
    (["--prefill", "half"], "--prefill"),
    (["--scorer", "nowhere"], "nowhere"),
    (["--max-new-tokens", "0"], "--max-new-tokens"),
    (["--speed", "9"], "--speed"),
]


@pytest.mark.parametrize(("arguments", "message"), GENERATING)
@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_mistakes_of_generating_commands(run, no_model, command, arguments, message):
    prompt = ["hello"] if command == "generate" else []
    check_refused(run(command, *prompt, *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "streaming,streming"], "did you mean 'streaming'"),
        (["--policies", "tova,tova"], "named twice"),
        (["--policies", ","], "no policy"),
        (["--budgets", "many"], "--budgets takes numbers"),
        (["--budgets", "128,0"], "--budgets takes numbers"),
        (["--budgets", "30"], "above sinks 4"),
        (["--budgets", "1023"], "no document is longer than the budget"),
        (["--data", "missing.txt"], "missing.txt"),
        (["--kinds", "poems"], "poems"),
        (["--json", "no/such/folder/out.json"], "there is no folder"),
        (["--json", "."], "is a folder"),
        (["--scorer", "kvpop"], "NAME=DIR"),
        (["--scorer", "streming=x"], "did you mean 'streaming'"),
        (["--documents", "0"], "--documents"),
        (["--length", "two"], "--length"),
    ],
)
def test_mistakes_of_evaluate(run, no_model, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    check_refused(run("evaluate", *arguments), message)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_prompt(run, no_model):
    check_refused(run("generate", "  "), "prompt is empty")
    check_refused(run("generate", "-", stdin=""), "prompt is empty")


def test_an_empty_document_and_a_short_one(run, folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    for name, message in (("empty", "empty.txt is empty"), ("short", "no document has 1024 tokens")):
        out = tmp_path / "out.json"
        arguments = ("--policies", "streaming", "--data", tmp_path / f"{name}.txt", "--json", out)
        check_refused(run("evaluate", "--model", folder, *arguments), message)
        assert not out.exists()


def test_a_model_that_is_not_there(run):
    check_refused(run("generate", "hello", "--model", "./no/such/model"), "no model folder .*no/such/model")


def test_a_device_that_is_not_there(run, folder):
    check_refused(run("generate", "hello", "--model", folder, "--device", "cuda:77", *BUDGET), "cuda:77")


def test_a_model_without_a_chat_template(run, folder, tmp_path):
    for path in folder.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    check_refused(run("chat", "--model", tmp_path, *BUDGET), "no chat template")


def test_a_model_without_a_kv_cache(run, folder, tmp_path):
    config = MambaConfig(vocab_size=300, hidden_size=16, state_size=4, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    for path in folder.glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    check_refused(run("generate", "hello", "--model", tmp_path, *BUDGET), "KV cache|attention")
    arguments = ("--policies", "streaming", "--length", "64", "--budgets", "40", "--data", __file__)
    check_refused(run("evaluate", "--model", tmp_path, *arguments), "KV cache|attention")


def test_our_own_fault_is_one_line_and_its_traceback_on_request(run, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("of a kind")

    monkeypatch.setattr(kvkeep.policies, "budget", fail)
    code, out, err = run("policies")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"kvkeep: a fault in kvkeep: ZeroDivisionError: of a kind .*\n", err)
    monkeypatch.setenv("KVKEEP_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["policies"])


def check_refused(result, message):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert re.fullmatch(r"kvkeep: [^\n]+\n", err), err
    assert re.search(message, err), err


# Generating


def test_generate_streams_and_ends_with_its_cost(run, folder):
    code, out, err = run("generate", "x" * 60, "--model", folder, "--max-new-tokens", "20", *BUDGET)
    assert code == 0, err
    summary = out.splitlines()[-1]
    assert re.search(r"^\[20 tokens, [\d.]+ tokens/s", summary)
    assert re.search(r"cache [\d.]+ MB, full cache [\d.]+ MB", summary)
    # 79 tokens are in the cache (the last one written is not): at most 40 of them are held.
    evicted = int(re.search(r"(\d+) tokens evicted", summary).group(1))
    assert evicted >= 79 - 40


def test_generate_with_the_full_cache_keeps_everything(run, folder):
    code, out, err = run("generate", "x" * 60, "--model", folder, "--max-new-tokens", "5", "--policy", "full")
    assert code == 0, err
    held, full = re.search(r"cache ([\d.]+) MB, full cache ([\d.]+) MB", out).groups()
    assert held == full
    assert " 0 tokens evicted" in out


def test_generate_reads_standard_input(run, folder):
    given = run("generate", "hello there", "--model", folder, "--max-new-tokens", "8", "--policy", "full")
    piped = run("generate", "--model", folder, "--max-new-tokens", "8", "--policy", "full", stdin="hello there")
    assert given[0] == piped[0] == 0
    assert given[1].splitlines()[:-1] == piped[1].splitlines()[:-1]


def test_sampling_repeats_with_its_seed(run, folder):
    def text(seed):
        arguments = ("--max-new-tokens", "24", "--temperature", "1.5", "--seed", seed, "--policy", "full")
        return "".join(run("generate", "hello", "--model", folder, *arguments)[1].splitlines()[:-1])

    assert text(1) == text(1) != text(2)


def test_a_budget_above_the_length_changes_nothing(loaded):
    ids = loaded[1]("the same as the stock model")["input_ids"]
    replies = [
        Session(*loaded, kvkeep.policies.create(name, 200)).write(ids, 12).text for name in ("full", "streaming", RULE)
    ]
    assert replies[0] == replies[1] == replies[2]


@pytest.mark.parametrize("words", [9, 20] if HANDED else [9])  # of four tokens: a prompt below and above the budget
def test_the_session_is_what_replay_says(loaded, words):
    model, tokenizer = loaded
    policy = kvkeep.policies.create(RULE, 40)
    session = Session(model, tokenizer, policy)
    reply = session.write(tokenizer("abc " * words)["input_ids"], 30, min_new_tokens=30)
    with torch.no_grad():
        logits = kvkeep.replay(model, torch.tensor([session.ids]), policy, return_logits=True).logits[0]
    assert session.ids[-30:] == greedy_path(logits, 30, model.generation_config.eos_token_id)
    assert reply.evicted >= len(session.ids) - 1 - 40


def greedy_path(logits, new, end):
    """The tokens that greedy decoding took, from the logits that led to them; the end token was forbidden."""
    chosen = logits[-new - 1 : -1].clone()
    chosen[:, end] = -torch.inf
    return chosen.argmax(-1).tolist()


def test_the_cache_keyword_is_the_models_own(loaded):
    assert cache_keyword(loaded[0]) in inspect.signature(loaded[0].forward).parameters


# Chat


def test_chat_on_a_pipe(run, folder):
    lines = "first question\n\nand another\n/reset\nfirst question\n/exit\nnever read\n"
    code, out, err = run("chat", "--model", folder, "--max-new-tokens", "6", *BUDGET, stdin=lines)
    assert code == 0, err
    replies = re.split(r"\n\[.*tokens evicted per KV head\]\n\n", out)
    assert len(replies) == 4  # three replies and what follows the last
    assert replies[2] == "[forgotten]\n" + replies[0]  # after /reset the same words get the same answer
    assert out.count("tokens evicted") == 3


def test_chat_ends_with_its_input(run, folder):
    code, out, _ = run("chat", "--model", folder, "--max-new-tokens", "3", *BUDGET, stdin="only one line")
    assert code == 0
    assert out.count("tokens evicted") == 1


def test_later_turns_continue_the_ids_of_the_first(loaded):
    """The ids of a conversation are the template's, whether the model closed its reply or was cut off."""
    tokenizer = loaded[1]
    first = chat.turn(tokenizer, [], "hello")
    for closing in ([], [tokenizer.eos_token_id]):
        reply = tokenizer("hi", add_special_tokens=False)["input_ids"] + closing
        so_far = first + reply
        so_far += chat.turn(tokenizer, so_far, "more?")
        roles = zip(("user", "assistant", "user"), ("hello", "hi", "more?"), strict=True)
        messages = [{"role": role, "content": content} for role, content in roles]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(so_far) == expected


# Evaluating


def test_evaluate_prints_a_table_and_writes_the_same_numbers(run, folder, texts, tmp_path):
    out_file = tmp_path / "out.json"
    policies = "full,streaming,random"
    arguments = ("evaluate", "--model", folder, "--policies", policies, "--budgets", "40,48", "--length", "100")
    code, out, err = run(*arguments, "--data", texts[0], "--data", texts[1], texts[2], "--json", out_file)
    assert code == 0, err
    result = json.loads(out_file.read_text())
    assert {(row["policy"], row["budget"]) for row in result["rows"] if row["kind"] == "all"} == {
        (policy, budget) for policy in policies.split(",") for budget in (40, 48)
    }
    for row in result["rows"]:
        assert row["documents"] == 3
        assert f"{row['loss_ratio']:.3f}" in out
    assert result["settings"]["model"] == str(folder)
    assert list(tmp_path.glob(".*")) == []
    again = run(*arguments, "--data", *texts, "--json", out_file)
    assert json.loads(out_file.read_text()) == result
    assert again[1] == out


def test_a_learned_policy_runs_with_its_scorer_only(run, folder, loaded, texts, tmp_path):
    scorer = kvkeep.scorers.new("kvpop_mlp", loaded[0].config, kvkeep.policies.budget("kvpop_mlp", 48))
    scorer.save_pretrained(tmp_path / "scorer")
    out = tmp_path / "out.json"
    arguments = ("evaluate", "--model", folder, "--policies", "streaming,kvpop_mlp", "--budgets", "48")
    arguments += ("--length", "100", "--data", *texts, "--json", out)
    check_refused(run(*arguments), "no kvpop_mlp scorer is shipped")
    code, text, err = run(*arguments, "--scorer", f"kvpop_mlp={tmp_path / 'scorer'}")
    assert code == 0, err
    assert re.search(r"kvpop_mlp +learned +[\d.]+ ", text)
    rows = {(row["policy"], row["kind"]): row for row in json.loads(out.read_text())["rows"]}
    assert rows["kvpop_mlp", "all"]["scorer"] == str(tmp_path / "scorer")
    assert rows["streaming", "all"]["scorer"] is None
    code, text, err = run(
        *("generate", "x" * 30, "--model", folder, "--max-new-tokens", "4", "--policy", "kvpop_mlp", "--budget", "48"),
        *("--scorer", tmp_path / "scorer", "--prefill", "dense"),
    )
    assert code == 0, err
    assert "4 tokens" in text


def test_a_stopped_evaluation_says_how_to_go_on(run, folder, texts, tmp_path, monkeypatch):
    from kvkeep.cli import evaluate as command

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "evaluate", stopped)
    out = tmp_path / "out.json"
    arguments = ("--policies", "streaming", "--budgets", "40", "--length", "100", "--data", texts[0], "--json", out)
    code, _, err = run("evaluate", "--model", folder, *arguments)
    assert code == 130
    assert "out.json.work; the same command goes on there" in err
    assert not out.exists()
