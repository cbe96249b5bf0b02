"""Runs engines of vLLM and says what they wrote and what their blocks held: `python engines.py JOBS.json OUT.pt`.

In a process of their own, since vLLM starts no engine in one that has used what numba compiles.
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


def run(jobs, folder: Path):
    """The results of jobs, in one process.

    Args:
        jobs: each ``model`` (a folder), ``settings`` (kvkeep's, None = dense), ``engine`` (options of vLLM), ``runs``,
            each a number of tokens to write and the step at which all requests are preempted (0 = never).
        folder: for the files in between.

    Returns:
        per job one ``{"ids", "held"}`` per run: ids of prompts and what was written, and per prompt the positions
        held, int32 ``[layers, H, n]``.
    """
    given, out = folder / "job.json", folder / "out.pt"
    given.write_text(json.dumps(jobs))
    command = [sys.executable, __file__, str(given), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the engines failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return torch.load(out)


def main(given: Path, out: Path) -> None:
    """All engines are started before the first is used."""
    jobs = json.loads(given.read_text())
    engines = [start(job) for job in jobs]
    results = []
    for job, (engine, serving) in zip(jobs, engines, strict=True):
        generate(engine, 2, 0, None)  # lays the layers out
        results.append([])
        for tokens, preempt_at in job["runs"]:
            forget_positions(serving)
            written = generate(engine, tokens, preempt_at, serving)
            held = [] if serving is None else [held_by(len(ids) - 1, serving) for ids in written]
            results[-1].append({"ids": written, "held": held})
    torch.save(results, out)


def start(job):
    from vllm import LLM

    from kvkeep.serving.vllm.served import latest

    keep = {} if job["settings"] is None else {"additional_config": {"kvkeep": job["settings"]}}
    defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True}
    few = {"enable_prefix_caching": False, "num_gpu_blocks_override": 12}
    return LLM(model=job["model"], **defaults | few | keep | job["engine"]).llm_engine, latest()


def generate(engine, tokens: int, preempt_at: int, serving) -> list[list[int]]:
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
            forget_positions(serving)
            assert engine.reset_prefix_cache(reset_running_requests=True)
    return [finished[str(index)] for index in range(len(PROMPTS))]


def forget_positions(serving) -> None:
    """So that what blocks hold afterwards is of the requests that come."""
    with torch.inference_mode():  # what vLLM runs layers under
        for layer in serving.layers.values() if serving else ():
            layer.pages.state["positions"].fill_(-1)


def held_by(length: int, serving):
    """int32 ``[layers, H, n]``: positions held of the one sequence of ``length`` tokens, in the order of the model.

    Its newest token, which every policy holds and no other request has got to, tells its block.
    """
    tokens = []
    for layer in sorted(serving.layers.values(), key=lambda layer: layer.geometry.layer):
        newest = layer.pages.state["positions"].flatten(1).max(-1).values
        (block,) = (newest == length - 1).nonzero().flatten().tolist()
        tokens.append(layer.held_tokens(block, length).clone())
    return torch.stack(tokens)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
