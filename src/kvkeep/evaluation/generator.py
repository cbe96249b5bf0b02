"""Procedural long-range documents: whoever has forgotten an early value cannot foresee the later text.

Three kinds, each drawn from an integer seed and identical on every Python version (only ``Random.random`` is used, the
one method whose sequence Python promises to keep):

* ``table``: registers of 10 to 28 keys with random values; every key is asked for later, in sentences and shuffled.
* ``trace``: six to ten variables that are reassigned step by step, each step restating values set long before.
* ``arithmetic``: numbered lines that compute with the results of lines far above.

Each kind has seven wordings, in `kvkeep.evaluation.wordings`, that share no sentence, no name and no layout. Scorers
are trained on all but ``"a"`` and measured on ``"a"``, so that a good result cannot come from knowing the template.

Names and sentences are few and come again: what is hard to foresee in these texts is the values.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from kvkeep.evaluation import wordings
from kvkeep.evaluation.wordings.base import SumWords, TableWords, TraceWords

KINDS = ("table", "trace", "arithmetic")
WORDINGS = tuple(wordings.ALL)
HELD_OUT = "a"  # the wording that nothing is trained on

_PIECES = re.compile(r"[^\W\d_]+|\d|[^\w\s]+|_+")


def token_floor(text: str) -> int:
    """A number of tokens that a text has at least: words, single digits and runs of signs.

    It holds for byte-level BPE tokenizers that split digits off one by one (SmolLM2, Qwen); those that join up to three
    digits (Llama 3) may need fewer.
    """
    return len(_PIECES.findall(text))


def generate(kind: str, seed: int, tokens_hint: int = 1200, wording: str = "a") -> str:
    """Writes one document.

    Args:
        kind: one of `KINDS`.
        seed: 0 or more; the same arguments give the same text on every machine.
        tokens_hint: the text goes on until its `token_floor` reaches this.
        wording: one of `WORDINGS`: sets of sentences, names and layouts without overlap.

    Returns:
        The text, ending with a newline.

    Raises:
        ValueError: unknown kind or wording, a negative seed or a length below 1.

    Example:
        >>> generate("trace", seed=7).splitlines()[0]
        'Eight jars stand on a shelf, each holding some beads.'
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of procedural document {kind!r}: use one of {', '.join(KINDS)}")
    if wording not in WORDINGS:
        raise ValueError(f"unknown wording {wording!r}: use one of {', '.join(WORDINGS)}")
    if seed < 0 or tokens_hint < 1:
        raise ValueError(f"a document needs a seed of 0 or more and at least 1 token, not {seed} and {tokens_hint}")
    page, draw = _Page(tokens_hint), _Draw(_stream(kind, seed, WORDINGS.index(wording)))
    write = {"table": _table, "trace": _trace, "arithmetic": _arithmetic}[kind]
    write(page, draw, getattr(wordings.ALL[wording], kind))
    return page.text


def _stream(kind: str, seed: int, wording: int) -> int:
    """What `Random` is seeded with: no two of kind, seed (below 2**60) and wording share a stream.

    The first two wordings take turns in the low numbers, as when there were only two, so that their texts stay what
    they were; every later one has its own 2**64 numbers.
    """
    document = seed * len(KINDS) + KINDS.index(kind)
    return document * 2 + wording if wording < 2 else (wording << 64) + document


class _Draw:
    """Random choices from ``Random.random`` alone."""

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:  # both included
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence):
        """One of the items; of a single one nothing is drawn."""
        return items[self.below(len(items))] if len(items) > 1 else items[0]

    def shuffled(self, items: Sequence) -> list:
        pool = list(items)
        for last in range(len(pool) - 1, 0, -1):
            other = self.below(last + 1)
            pool[last], pool[other] = pool[other], pool[last]
        return pool


class _Page:
    """Collects lines until there is enough text."""

    def __init__(self, tokens: int):
        self.text, self._left = "", tokens

    @property
    def full(self) -> bool:
        return self._left <= 0

    def line(self, text: str) -> None:
        self.text += text + "\n"
        self._left -= token_floor(text)

    def paragraph(self, *lines: str) -> None:
        """Lines with an empty one before them, unless the page is empty."""
        self.text += "\n" if self.text else ""
        self.line("\n".join(lines))


# ---- tables


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def _table(page: _Page, draw: _Draw, words: TableWords) -> None:
    """Registers one after the other; the keys of each are queried in shuffled order, a few older ones among them."""
    firsts, seconds = words.keys
    keys = iter(draw.shuffled([f"{first}{words.key_joint}{second}" for first in firsts for second in seconds]))
    values = iter(draw.shuffled(words.values))
    known: dict[str, int | str] = {}
    register = 0
    while not page.full:
        fresh = {next(keys): next(values) for _ in range(draw.between(*words.sizes))}
        title = draw.pick(words.titles).format(number=_ORDINALS[register % len(_ORDINALS)])
        lines = [draw.pick(words.lines).format(key=key, value=value) for key, value in fresh.items()]
        page.paragraph(title)
        page.paragraph(words.line_gap.join([words.heading, *lines]))
        page.paragraph(words.sentence_gap.join(_idle(draw, words) for _ in range(draw.between(6, 9))))
        older = draw.shuffled(list(known))[:6]
        known |= fresh
        asked = draw.shuffled([*fresh, *older])
        while asked and not page.full:
            some, asked = asked[:5], asked[5:]
            sentences = [draw.pick(words.queries).format(key=key, value=known[key]) for key in some]
            page.paragraph(words.sentence_gap.join([*sentences, _idle(draw, words)]))
        register += 1


def _idle(draw: _Draw, words: TableWords) -> str:
    return " ".join(draw.pick(part) for part in words.idle) + words.idle_end


# ---- traces


def _trace(page: _Page, draw: _Draw, words: TraceWords) -> None:
    """Steps that set, raise or copy a variable, and mostly restate one that was not mentioned for long."""
    largest = words.largest
    state = {name: draw.between(10, largest) for name in draw.shuffled(words.names)}
    starts = [draw.pick(words.start).format(name=name, new=value) for name, value in state.items()]
    page.paragraph(words.opening, *starts)
    stale = list(state)  # names, the longest unmentioned first
    n = 0
    while not page.full:
        n += 1
        name = stale[draw.below(len(stale) - 2)]
        source = draw.pick([other for other in state if other != name])
        by, fresh = draw.between(2, largest // 5), draw.between(10, largest)
        choices = [(words.assign, fresh), (words.add, state[name] + by), (words.copy, state[source])]
        templates, new = draw.pick(choices if state[name] + by <= largest else choices[::2])
        line = draw.pick(templates).format(n=n, name=name, old=state[name], new=new, by=by, source=source)
        state[name] = new
        mentioned = [name, source] if templates is words.copy else [name]
        stale = [other for other in stale if other not in mentioned] + mentioned
        if draw.below(3):
            other = stale[draw.below(3)]
            line += draw.pick(words.restate).format(name=other, value=state[other])
            stale = [left for left in stale if left != other] + [other]
        page.line(line)


# ---- arithmetic


_NEAREST_REFERENCE = 6  # lines back, once there are that many: nearer results would be easy to keep


def _arithmetic(page: _Page, draw: _Draw, words: SumWords) -> None:
    """Lines that add, subtract or shift results that stand at least `_NEAREST_REFERENCE` lines above."""
    results = [draw.between(10, words.largest // 5) for _ in range(8)]
    starts = [draw.pick(words.start).format(n=n, new=new) for n, new in enumerate(results, 1)]
    page.paragraph(words.opening, *starts)
    while not page.full:
        reach = max(len(results) - _NEAREST_REFERENCE, 2)
        i = draw.below(reach)
        j = (i + draw.between(1, reach - 1)) % reach  # any other line
        x, y, by = results[i], results[j], draw.between(3, words.largest // 20)
        templates, new = draw.pick([(words.add, x + y), (words.subtract, x - y), (words.shift, x + by)])
        if not 10 <= new <= words.largest:
            continue
        line = draw.pick(templates).format(n=len(results) + 1, i=i + 1, x=x, j=j + 1, y=y, by=by, new=new)
        page.line(line)
        results.append(new)
