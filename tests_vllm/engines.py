"""Runs one engine of vLLM and says what it wrote and what its blocks held: `python engines.py JOB.json OUT.pt`.

An engine has a process of its own: vLLM starts no second one in a process that has used what numba compiles.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

PROMPTS = [
    "Once upon a time there was",
    "Instructions: go on with the list as it stands and never repeat a number. " + ", ".join(map(str, range(1, 50))),
    "Marta has a black cat. Her cat is called Pepper, and her dog is called Bruno. Every morning they walk to the "
    "river, past the mill and the old bridge, and when it rains they stay at home. One day Marta",
]


def run(job, folder: Path, **environment):
    """The result of a job in a process of its own.

    Args:
        job: ``model`` (a folder), ``settings`` (kvkeep's, None = dense), ``engine`` (options of vLLM), ``runs``, each
            a number of tokens to write and the step at which all requests are preempted (0 = never).
        folder: for the files in between.
        environment: further variables.

    Returns:
        one of ``{"ids", "held"}`` per run: ids of prompts and what was written, and per prompt the positions held,
        int32 ``[layers, H, n]``.
    """
    import os

    given, out = folder / "job.json", folder / "out.pt"
    given.write_text(json.dumps(job))
    command = [sys.executable, __file__, str(given), str(out)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the engine failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return torch.load(out)


def main(job: Path, out: Path) -> None:
    from vllm import LLM

    job = json.loads(job.read_text())
    keep = {} if job["settings"] is None else {"additional_config": {"kvkeep": job["settings"]}}
    defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True}
    llm = LLM(model=job["model"], **defaults | {"enable_prefix_caching": False} | keep | job["engine"])
    generate(llm.llm_engine, 2, 0)  # lays the layers out
    results = []
    for tokens, preempt_at in job["runs"]:
        forget_positions()
        written = generate(llm.llm_engine, tokens, preempt_at)
        held = [] if job["settings"] is None else [held_by(len(ids) - 1) for ids in written]
        results.append({"ids": written, "held": held})
    torch.save(results, out)


def generate(engine, tokens: int, preempt_at: int) -> list[list[int]]:
    """Greedily, all prompts together; ids of each prompt and what was written after it."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, parameters)
    finished, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
        steps += 1
        if steps == preempt_at:
            forget_positions()
            assert engine.reset_prefix_cache(reset_running_requests=True)
    return [finished[str(index)] for index in range(len(PROMPTS))]


def forget_positions() -> None:
    """So that what blocks hold afterwards is of the requests that come."""
    from kvkeep.serving.vllm.served import latest

    with torch.inference_mode():  # what vLLM runs layers under
        for layer in latest().layers.values() if latest() else ():
            layer.pages.state["positions"].fill_(-1)


def held_by(length: int):
    """int32 ``[layers, H, n]``: positions held of the one sequence of ``length`` tokens, in the order of the model.

    Its newest token, which every policy holds and no other request has got to, tells its block.
    """
    from kvkeep.serving.vllm.served import latest

    tokens = []
    for layer in sorted(latest().layers.values(), key=lambda layer: layer.geometry.layer):
        newest = layer.pages.state["positions"].flatten(1).max(-1).values
        (block,) = (newest == length - 1).nonzero().flatten().tolist()
        tokens.append(layer.held_tokens(block, length).clone())
    return torch.stack(tokens)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
