"""One user on a laptop: the OpenAI API over transformers' ``generate`` and an evicting cache, a request at a time.

Completions, chat, streaming, stop strings and temperature; what it cannot do it refuses with a 400. No batching, no
further dependency: for more than one user there is vLLM.
"""

from __future__ import annotations

import json
import select
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from kvkeep.policies.base import Policy
from kvkeep.runtime.cache import EvictingCache, cache_keyword

LARGEST_BODY = 4_000_000  # bytes
UNSUPPORTED = ("logprobs", "top_logprobs", "tools", "response_format", "logit_bias", "echo", "suffix", "best_of")


class BadRequest(ValueError):
    """The client's mistake, in one sentence."""


@dataclass(frozen=True)
class Wanted:
    """A request, checked.

    Attributes:
        ids: of the prompt.
        tokens: to write at most.
        temperature: 0 takes the likeliest token.
        top_p: share of the probability that is drawn from.
        stop: strings that end the text before them.
        seed: of the draw.
        stream: whether text is wanted as it comes.
        chat: whether the answer is a message.
    """

    ids: list[int]
    tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: int | None
    stream: bool
    chat: bool


class Model:
    """A model, its tokenizer and a policy, used by one request at a time.

    Args:
        model: loaded with attention "kvkeep".
        tokenizer: of the model.
        policy: what to keep.
        name: what clients call it.
        prefill: how a prompt enters, "sparse" or "dense".
    """

    def __init__(self, model: Any, tokenizer: Any, policy: Policy, name: str, prefill: str = "sparse"):
        self.model, self.tokenizer, self.policy, self.name, self.prefill = model, tokenizer, policy, name, prefill
        self.longest = int(getattr(model.config, "max_position_embeddings", 2**31))
        self.busy = threading.Lock()
        self.evicted = self.tokens = self.requests = 0

    def read(self, body: Any, chat: bool) -> Wanted:
        """A request as OpenAI's clients send it.

        Raises:
            BadRequest: for what is missing, malformed, too long or not supported.
        """
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        if body.get("model", self.name) != self.name:
            raise BadRequest(f"the model {body['model']!r} is not served here, {self.name!r} is")
        asked = [name for name in UNSUPPORTED if body.get(name) not in (None, False, 0, {}, [])]
        if asked or body.get("n") not in (None, 1):
            raise BadRequest(f"{asked[0] if asked else 'n'} is not supported by --engine transformers; use vllm")
        ids = self.chat_ids(body) if chat else self.prompt_ids(body)
        room = self.longest - len(ids)
        given = body.get("max_completion_tokens") or body.get("max_tokens")
        tokens = _number(body | {"max_tokens": given}, "max_tokens", min(max(room, 1), 16 if not chat else room), 1)
        if not ids or tokens > room:
            raise BadRequest(
                f"{len(ids)} tokens of prompt and {tokens} to write: this model takes 1 to {self.longest} together"
            )
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise BadRequest("stop must be a string or a list of strings")
        return Wanted(
            ids,
            tokens,
            _number(body, "temperature", 1.0, 0, float),
            _number(body, "top_p", 1.0, 0, float),
            tuple(stop),
            _number(body, "seed", None, -(2**63)),
            bool(body.get("stream")),
            chat,
        )

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        size = len(self.tokenizer)
        if isinstance(prompt, list) and prompt and all(isinstance(i, int) and 0 <= i < size for i in prompt):
            return prompt
        raise BadRequest("prompt must be one string or one list of token ids")

    def chat_ids(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        fine = isinstance(messages, list) and messages
        if not fine or not all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in messages):
            raise BadRequest("messages must be a list of objects with role and a text as content")
        if not self.tokenizer.chat_template:
            raise BadRequest("this model has no chat template: use completions")
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    def write(self, wanted: Wanted, on_text: Callable[[str], None], gone: Callable[[], bool]) -> dict[str, Any]:
        """Generate, handing on text that is certain.

        Args:
            wanted: the request.
            on_text: called with every piece of text.
            gone: asked after every token whether the client has left.

        Returns:
            ``finish_reason`` and ``usage``, with the tokens that every KV head kept and evicted.
        """
        with self.busy, torch.inference_mode():
            cache = EvictingCache(self.model.config, self.policy, prefill=self.prefill)
            inputs = torch.tensor([wanted.ids], device=self.model.device)
            stops = Stops(self.tokenizer, wanted.stop, on_text, gone)
            draw = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            if wanted.temperature:
                draw = {"do_sample": True, "temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": 0}
                torch.manual_seed(torch.seed() if wanted.seed is None else wanted.seed)
            out = self.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=wanted.tokens,
                streamer=stops,
                stopping_criteria=StoppingCriteriaList([stops.criterion]),
                pad_token_id=self.tokenizer.pad_token_id,
                **{cache_keyword(self.model): cache},
                **draw,
            )
            written, evicted = out.shape[1] - len(wanted.ids), int(cache.evicted)
            self.requests, self.evicted = self.requests + 1, self.evicted + evicted
            self.tokens += cache.get_seq_length()
        ended = stops.found or out[0, -1].item() in _ends(self.model)
        usage = {"prompt_tokens": len(wanted.ids), "completion_tokens": written, "total_tokens": out.shape[1]}
        usage["kvkeep"] = {"kept_tokens": cache.get_seq_length() - evicted, "evicted_tokens": evicted}
        return {"finish_reason": "stop" if ended else "length", "usage": usage}

    def report(self) -> dict[str, Any]:
        """What `GET /kvkeep` shows."""
        layers = len(EvictingCache(self.model.config, self.policy).evicting_layers)
        counts = {"tokens": self.tokens, "evicted": self.evicted, "requests": self.requests}
        return {"layers": layers, "policy": self.policy.name, "budget": {"slots": self.policy.budget.slots}} | counts


class Stops(TextStreamer):
    """Hands on text up to a stop string, and ends the generation at one or where the client has left."""

    def __init__(self, tokenizer, stop: tuple[str, ...], on_text: Callable[[str], None], gone: Callable[[], bool]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stop, self.on_text, self.pending, self.found = stop, on_text, "", False
        self.criterion = _Ended(lambda: self.found or gone())

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.found:
            return
        self.pending += text
        ends = [at for at in map(self.pending.find, self.stop) if at >= 0]
        if ends:
            self.found, stream_end, self.pending = True, True, self.pending[: min(ends)]
        # what might yet become a stop string waits
        waits = 0 if stream_end else max((_overlap(self.pending, stop) for stop in self.stop), default=0)
        ready, self.pending = self.pending[: len(self.pending) - waits], self.pending[len(self.pending) - waits :]
        if ready:
            self.on_text(ready)


class _Ended(StoppingCriteria):
    def __init__(self, ended: Callable[[], bool]):
        self.ended = ended

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.ended(), device=input_ids.device)


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of ``text`` that begin ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def _number(body: dict[str, Any], name: str, default: Any, least: float, kind: type = int) -> Any:
    value = body.get(name)
    if value is None:
        return default
    fine = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if isinstance(value, bool) or not fine or not least <= value < 2**63:
        raise BadRequest(f"{name} must be a number of at least {least}, not {value!r}")
    return value


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 over a :class:`Model`, found as ``server.model``."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet: errors go to the client."""

    def do_GET(self) -> None:
        model: Model = self.server.model
        if self.path == "/health":
            self.send(200, b"", "text/plain")
        elif self.path == "/v1/models":
            one = {"id": model.name, "object": "model", "owned_by": "kvkeep", "max_model_len": model.longest}
            self.send_json(200, {"object": "list", "data": [one]})
        elif self.path == "/kvkeep":
            self.send_json(200, model.report())
        elif self.path == "/metrics":
            counts = (("kvkeep_evicted_tokens_total", model.evicted), ("kvkeep_tokens_total", model.tokens))
            text = "".join(
                f'# TYPE {name} counter\n{name}{{policy="{model.policy.name}"}} {value}\n' for name, value in counts
            )
            self.send(200, text.encode(), "text/plain; version=0.0.4")
        else:
            self.send_error_json(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        routes = {"/v1/completions": False, "/v1/chat/completions": True}
        try:
            size = int(self.headers.get("Content-Length") or 0)
            if self.path not in routes:
                self.close_connection = True
                self.send_error_json(404, f"there is no {self.path}")
                return
            if size > LARGEST_BODY:
                self.close_connection = True  # the body stays unread
                self.send_error_json(413, f"a body of {size} bytes is larger than {LARGEST_BODY}")
                return
            try:
                body = json.loads(self.rfile.read(size))
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                raise BadRequest(f"the body is not JSON: {error}") from error
            wanted = self.server.model.read(body, routes[self.path])
            (self.stream if wanted.stream else self.answer)(wanted)
        except BadRequest as error:
            self.send_error_json(400, str(error))

    def answer(self, wanted: Wanted) -> None:
        pieces: list[str] = []
        end = self.server.model.write(wanted, pieces.append, self.left)
        if not self.left():
            text = "".join(pieces)
            content = {"message": {"role": "assistant", "content": text}} if wanted.chat else {"text": text}
            choice = {"index": 0, "finish_reason": end["finish_reason"], "logprobs": None} | content
            self.send_json(200, self.frame(wanted, False) | {"choices": [choice], "usage": end["usage"]})

    def stream(self, wanted: Wanted) -> None:
        """Server-sent events, ended by the client's leaving or ``[DONE]``."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        frame, first = self.frame(wanted, True), {"role": "assistant"} if wanted.chat else {}

        def event(text: str, reason: str | None = None, **more: Any) -> None:
            content = {"delta": first | {"content": text}} if wanted.chat else {"text": text}
            first.clear()
            choice = {"index": 0, "finish_reason": reason, "logprobs": None} | content
            self.wfile.write(f"data: {json.dumps(frame | {'choices': [choice]} | more)}\n\n".encode())
            self.wfile.flush()

        try:
            end = self.server.model.write(wanted, event, self.left)
            event("", end["finish_reason"], usage=end["usage"])
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            return

    def left(self) -> bool:
        """Whether the client has closed the connection: it has nothing more to send, so anything to read is its end."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def frame(self, wanted: Wanted, streaming: bool) -> dict[str, Any]:
        kind = "chat.completion" if wanted.chat else "text_completion"
        kind += ".chunk" if streaming and wanted.chat else ""
        name = ("chatcmpl-" if wanted.chat else "cmpl-") + uuid.uuid4().hex
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.server.model.name}

    def send_error_json(self, code: int, message: str) -> None:
        self.send_json(code, {"error": {"message": message, "type": "invalid_request_error", "code": code}})

    def send_json(self, code: int, body: Any) -> None:
        self.send(code, json.dumps(body).encode(), "application/json")

    def send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(model: Model, host: str, port: int) -> ThreadingHTTPServer:
    """A server that listens; call its ``serve_forever``. Port 0 takes a free one.

    Raises:
        OSError: where the address cannot be listened to.
    """
    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    server.model = model
    return server
