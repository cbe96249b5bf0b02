"""What any server of ours answers OpenAI's own client: the same checks for every engine."""

from __future__ import annotations

import json
import urllib.request

import openai
import pytest


def client_for(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=600) as answer:
        return answer.read().decode()


def metric(url, name):
    """The sum of a metric's samples."""
    lines = [line for line in get(url, "/metrics").splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    assert lines, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def check_completions(client, model, prompt):
    """Greedy text of a given length, the same twice, counted right; and no text beyond what was asked for."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    assert first.choices[0].text == second.choices[0].text
    assert first.usage.completion_tokens == 12 or first.choices[0].finish_reason == "stop"
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    return first.choices[0].text


def check_chat(client, model):
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].finish_reason in ("stop", "length")


def check_streaming(client, model, prompt):
    """The pieces of a stream are the answer that comes at once."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked).choices[0]
    pieces = [event for event in client.completions.create(**asked, stream=True) if event.choices]
    assert len(pieces) > 1
    assert "".join(event.choices[0].text for event in pieces) == whole.text
    assert pieces[-1].choices[0].finish_reason == whole.finish_reason
    messages = [{"role": "user", "content": "Say hello."}]
    asked = {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stream = [event for event in client.chat.completions.create(**asked, stream=True) if event.choices]
    assert "".join(event.choices[0].delta.content or "" for event in stream) == whole


def check_stop_strings(client, model, prompt):
    """Text ends before the string, streamed or not."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    expected = text[: text.index(stop)]
    stopped = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (expected, "stop")
    stream = client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(event.choices[0].text for event in stream if event.choices) == expected


def check_bad_requests(client, url, model, longest):
    """Mistakes are answered with a 4xx and a sentence, and the server lives."""
    good = {"model": model, "prompt": "Hello", "max_tokens": 4}
    for bad in (
        {"model": "another"},
        {"max_tokens": -1},
        {"max_tokens": longest + 1},
        {"prompt": [7] * (longest + 1)},
        {"temperature": -1.0},
        {"temperature": "hot"},
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(**good | bad)
        assert 400 <= refused.value.status_code < 500, bad
        assert refused.value.message
    for path, body in (("/v1/completions", b"{not json"), ("/v1/chat/completions", b"[]"), ("/v1/nowhere", b"{}")):
        request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert 400 <= refused.value.code < 500, path
    assert client.completions.create(**good).choices[0].text is not None


def check_eviction_shows(client, url, model, slots):
    """A prompt of ``slots + 20`` tokens and 5 more loses 24: the last token of a sequence never enters its cache."""
    before, seen = metric(url, "kvkeep_evicted_tokens_total"), metric(url, "kvkeep_tokens_total")
    prompt = [5 + i % 50 for i in range(slots + 20)]
    client.completions.create(model=model, prompt=prompt, max_tokens=5, temperature=0, extra_body={"ignore_eos": True})
    report = json.loads(get(url, "/kvkeep"))
    assert report["budget"]["slots"] == slots
    assert report["layers"] > 0
    assert metric(url, "kvkeep_tokens_total") - seen == slots + 24
    assert metric(url, "kvkeep_evicted_tokens_total") - before == report["evicted"] - before == 24


def check_everything(url, model, slots, longest, prompt="One, two, three, four,"):
    client = client_for(url)
    assert [one.id for one in client.models.list()] == [model]
    check_completions(client, model, prompt)
    check_chat(client, model)
    check_streaming(client, model, prompt)
    check_stop_strings(client, model, prompt)
    check_bad_requests(client, url, model, longest)
    check_eviction_shows(client, url, model, slots)
