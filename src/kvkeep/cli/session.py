"""A text that grows on one bounded cache: what generate, chat and demo share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

import kvkeep
from kvkeep.evaluation.evaluate import kv_bytes
from kvkeep.policies.base import Policy
from kvkeep.runtime.cache import cache_keyword


@dataclass(frozen=True)
class Reply:
    """What one turn wrote, and what it cost."""

    text: str
    tokens: int
    first_seconds: float  # until the first token: reading the prompt
    rest_seconds: float  # for the tokens after it
    cache_bytes: int
    full_bytes: int  # of a cache that keeps every token seen
    evicted: float  # tokens, mean over layers and KV heads

    def summary(self) -> str:
        """One line: speed, bytes against the full cache, evictions."""
        if self.tokens > 1:
            speed = f"{(self.tokens - 1) / max(self.rest_seconds, 1e-9):.1f} tokens/s"
        else:
            speed = f"{self.tokens / max(self.first_seconds, 1e-9):.1f} tokens/s"
        return (
            f"{self.tokens} tokens, {speed} after {self.first_seconds:.1f} s for the prompt | "
            f"cache {_size(self.cache_bytes)}, full cache {_size(self.full_bytes)} | "
            f"{self.evicted:.0f} tokens evicted per KV head"
        )


class Session:
    """One sequence: its ids so far and the cache that holds what is left of them.

    Args:
        model: loaded with attention "kvkeep".
        tokenizer: of the model.
        policy: what to keep.
        prefill: how a prompt enters, "sparse" or "dense".
    """

    def __init__(self, model: Any, tokenizer: Any, policy: Policy, prefill: str = "sparse"):
        self.model, self.tokenizer, self.policy, self.prefill = model, tokenizer, policy, prefill
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.cache = kvkeep.EvictingCache(self.model.config, self.policy, prefill=self.prefill)
        self.ids: list[int] = []

    def write(
        self,
        ids: list[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        on_text: Callable[[str], None] = lambda text: None,
        min_new_tokens: int | None = None,
    ) -> Reply:
        """Appends `ids` and lets the model go on.

        Args:
            ids: new tokens; with those before them at least one.
            max_new_tokens: to generate at most.
            temperature: 0 takes the likeliest token.
            on_text: called with the text as it comes.
            min_new_tokens: before which the model may not stop.

        Returns:
            The reply; its last token is in `self.ids` but enters the cache with the next turn.

        Raises:
            ValueError: if there is nothing to go on from.
        """
        self.ids += ids
        if not self.ids:
            raise ValueError("the prompt is empty: there is nothing to go on from")
        inputs = torch.tensor([self.ids], device=self.model.device)
        streamer = _Streamer(self.tokenizer, on_text)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else _greedy()
        if min_new_tokens:
            sampling["min_new_tokens"] = min_new_tokens
        out = self.model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            pad_token_id=self.tokenizer.pad_token_id,
            **{cache_keyword(self.model): self.cache},
            **sampling,
        )
        new = out[0, len(self.ids) :].tolist()
        self.ids += new
        return self._reply(new, streamer)

    def _reply(self, new: list[int], streamer: _Streamer) -> Reply:
        seen = self.cache.get_seq_length()
        return Reply(
            text=self.tokenizer.decode(new, skip_special_tokens=True),
            tokens=len(new),
            first_seconds=streamer.first - streamer.started,
            rest_seconds=streamer.last - streamer.first,
            cache_bytes=self.cache.nbytes,
            full_bytes=kv_bytes(self.model.config, seen, seen, self.model.dtype.itemsize),
            evicted=float(self.cache.evicted),
        )


class _Streamer(TextStreamer):
    """Hands on text as it becomes certain, and notes when the first and the last token came."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.started = self.first = self.last = time.perf_counter()
        self.came = 0

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.last = time.perf_counter()
            self.first = self.last if not self.came else self.first
            self.came += 1
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


def _greedy() -> dict[str, Any]:
    """Greedy decoding, whatever the model's own generation settings say about sampling."""
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
