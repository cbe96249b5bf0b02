"""Engines of vLLM in this process, and what their blocks hold."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from kvkeep.serving.vllm.served import latest

PROMPTS = [
    "Once upon a time there was",
    "Instructions: go on with the list as it stands and never repeat a number. " + ", ".join(map(str, range(1, 50))),
    "Marta has a black cat. Her cat is called Pepper, and her dog is called Bruno. Every morning they walk to the "
    "river, past the mill and the old bridge, and when it rains they stay at home. One day Marta",
]


@contextmanager
def engine(folder, policy=None, budget=64, **options):
    """An engine, dense without a policy; gone with all it holds afterwards."""
    settings = options.pop("settings", {})
    keep = {} if policy is None else {"additional_config": {"kvkeep": {"policy": policy, "budget": budget, **settings}}}
    defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}
    common = {"enforce_eager": True, "enable_prefix_caching": False}
    llm = LLM(model=folder, **defaults | common | keep | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def greedy(llm, prompts, tokens):
    """Ids of prompts and what the engine wrote after them."""
    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [
        list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
        for output in llm.generate(prompts, parameters, use_tqdm=False)
    ]


def forget_positions():
    """So that what blocks hold afterwards is of the requests that come."""
    with torch.inference_mode():  # what vLLM runs layers under
        for layer in latest().layers.values():
            layer.pages.state["positions"].fill_(-1)


def held_by(length):
    """int32 ``[layers, H, n]``: positions held of the one sequence of ``length`` tokens, in the order of the model.

    Its newest token, which every policy holds and no other request has got to, tells its block.
    """
    tokens = []
    for _, layer in sorted(latest().layers.items(), key=lambda item: item[1].geometry.layer):
        newest = layer.pages.state["positions"].flatten(1).max(-1).values
        (block,) = (newest == length - 1).nonzero().flatten().tolist()
        tokens.append(layer.held_tokens(block, length))
    return torch.stack(tokens)
