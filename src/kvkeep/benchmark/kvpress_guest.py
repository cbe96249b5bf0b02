"""The other side of :mod:`kvkeep.benchmark.kvpress`: run by a python that has kvpress, and perhaps no kvkeep.

Reads one JSON request a line and answers each with one. Imports nothing of kvkeep, whose transformers may be another.
"""

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path


class Session:
    """kvpress's DecodingPress over a model that is fed given tokens one at a time.

    Args:
        asked: model (folder or hub id), dtype, attention, press and its options, target (tokens after an eviction),
            interval, buffer (hidden states kept), ids (the text), prompt (how many of them are read at once), watch
            (also find out which tokens are held).
    """

    def __init__(self, asked: dict):
        import kvpress
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.torch = torch
        dtype = getattr(torch, asked["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(
            asked["model"], dtype=dtype, attn_implementation=asked["attention"]
        ).eval()
        base = getattr(kvpress, asked["press"])(**asked["options"])
        session = self
        self.positions: dict[int, object] = {}  # layer -> [heads, tokens held]

        class Watched(kvpress.DecodingPress):
            """Follows the positions of what is kept, by finding each kept key among those before."""

            def compress(self, module, hidden_states, keys, values, attentions, kwargs):
                kept = super().compress(module, hidden_states, keys, values, attentions, kwargs)
                if asked["watch"]:
                    session.follow(module.layer_idx, keys, kept[0])
                return kept

        press = Watched(base, asked["interval"], asked["target"], asked["buffer"])
        self.press = press
        self.cache = DynamicCache(config=self.model.config)
        self.ids, self.done = asked["ids"], 0
        self.pressing = press(self.model)  # for as long as this process lives
        self.pressing.__enter__()
        self.forward(asked["prompt"])
        reset_peak()
        self.start = status("VmRSS")
        self.most = 0

    def forward(self, count: int) -> None:
        piece = self.torch.tensor([self.ids[self.done : self.done + count]])
        where = self.torch.arange(self.done, self.done + count)
        self.model(piece, past_key_values=self.cache, use_cache=True, cache_position=where, position_ids=where[None])
        self.done += count

    def step(self) -> float:
        """Milliseconds of processor time of one token."""
        start = time.thread_time()
        self.forward(1)
        spent = 1000 * (time.thread_time() - start)
        self.most = max(self.most, self.held_bytes())
        return spent

    def held_bytes(self) -> int:
        """Keys and values, and the hidden states that the press keeps."""
        pairs = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
        return pairs + sum(state.nbytes for states in self.press.hidden_states_buffer.values() for state in states)

    def follow(self, layer: int, before, after) -> None:
        torch = self.torch
        held = self.positions.get(layer)
        count = before.shape[2]
        if held is None:
            held = torch.arange(count).expand(before.shape[1], -1)
        newer = torch.arange(self.done + 1 - (count - held.shape[1]), self.done + 1).expand(before.shape[1], -1)
        held = torch.cat([held, newer], 1)
        same = (after[0, :, :, None] == before[0, :, None]).all(-1)  # [heads, kept, tokens before]
        self.positions[layer] = held.gather(1, same.float().argmax(-1))

    def kept(self) -> list:
        return [sorted_rows(self.positions[layer]) for layer in sorted(self.positions)]

    def sizes(self) -> dict:
        return {"held_bytes": self.most, "peak_growth": status("VmHWM") - self.start}


def sorted_rows(positions) -> list:
    return positions.sort(-1).values.tolist()


def status(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def reset_peak() -> None:
    """Let VmHWM begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def versions() -> dict:
    return {name: metadata.version(name) for name in ("kvpress", "torch", "transformers")}


def main() -> None:
    """Serve until the input ends; an error is an answer and the end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    session = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "start":
                session = Session(asked)
                said = versions()
            elif asked["do"] == "step":
                said = session.step()
            else:
                said = getattr(session, asked["do"])()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side must be told
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
