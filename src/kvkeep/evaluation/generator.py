"""Procedural long-range documents: whoever has forgotten an early value cannot foresee the later text.

Three kinds, each drawn from an integer seed and identical on every Python version (only ``Random.random`` is used, the
one method whose sequence Python promises to keep):

* ``table``: registers of 16 to 22 keys with random values; every key is asked for later, in sentences and shuffled.
* ``trace``: eight variables that are reassigned step by step, each step restating values set long before.
* ``arithmetic``: numbered lines that compute with the results of lines far above.

Each kind has two wordings that share no sentence, no name and no layout. Scorers are trained on ``"b"`` and measured on
``"a"``, so that a good result cannot come from knowing the template.

Names and sentences are few and come again: what is hard to foresee in these texts is the numbers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("table", "trace", "arithmetic")
WORDINGS = ("a", "b")

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
        wording: ``"a"`` or ``"b"``: two sets of sentences, names and layouts without overlap.

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
    stream = (seed * len(KINDS) + KINDS.index(kind)) * len(WORDINGS) + WORDINGS.index(wording)
    page, draw = _Page(tokens_hint), _Draw(stream)
    write, words = {"table": (_table, _TABLES), "trace": (_trace, _TRACES), "arithmetic": (_arithmetic, _SUMS)}[kind]
    write(page, draw, words[wording])
    return page.text


class _Draw:
    """Random choices from ``Random.random`` alone."""

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:  # both included
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence):
        return items[self.below(len(items))]

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


@dataclass(frozen=True)
class _TableWords:
    titles: Sequence[str]  # {number} is the number of the register, in words
    heading: str
    line: str  # {key}, {value}
    keys: tuple[Sequence[str], Sequence[str]]  # first and second word of a key
    queries: Sequence[str]  # {key}, {value}; neither digits nor another key besides
    idle: tuple[Sequence[str], Sequence[str], Sequence[str]]  # who, does what, where: sentences without a value


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")

_TABLES = {
    "a": _TableWords(
        titles=("This is the {number} register of the lost property office.", "Here begins the {number} shelf list."),
        heading="Article: number",
        line="{key}: {value}",
        keys=(
            ("amber", "brass", "copper", "crimson", "dusty", "empty", "faded", "green", "heavy", "ivory",
             "leather", "narrow", "oval", "painted", "purple", "rusty", "silver", "spotted", "striped", "tiny",
             "velvet", "wooden"),
            ("basket", "bell", "brush", "button", "candle", "clock", "drum", "flute", "glove", "hammer", "kettle",
             "ladder", "lantern", "mirror", "needle", "pillow", "ribbon", "saddle", "spoon", "trunk", "umbrella",
             "whistle"),
        ),
        queries=(
            "The clerk looked up the {key} and found {value} beside it.",
            "According to the register, the {key} carries the number {value}.",
            "Whoever asks for the {key} is told {value}.",
            "On the label tied to the {key} one reads {value}.",
            "A lady came about the {key}, and the answer was {value}.",
            "For the {key}, the number to write on the slip is {value}.",
            "Nobody had collected the {key}, so {value} stayed on the list.",
        ),
        idle=(
            ("The old clerk", "A young porter", "The night watchman", "A tired traveller", "The office cat",
             "One of the inspectors", "A boy with a cap", "The cleaner"),
            ("waited patiently", "hummed a slow tune", "counted nothing at all", "drank a cup of tea",
             "read the morning paper", "talked about the weather", "looked out at the rain", "fell asleep"),
            ("beside the counter", "near the front door", "under the stairs", "by the stove",
             "at the end of the corridor", "in the back room", "behind a pile of boxes", "on the long bench"),
        ),
    ),
    "b": _TableWords(
        titles=("## Telephone directory, {number} floor", "## Dialling codes, {number} issue"),
        heading="| office | extension |",
        line="| {key} | {value} |",
        keys=(
            ("Abbey", "Birch", "Castle", "Dover", "Elm", "Forest", "Garden", "Harbour", "Island", "Juniper", "King",
             "Lake", "Meadow", "Norfolk", "Orchard", "Priory", "Queen", "River", "Station", "Temple", "Union",
             "Willow"),
            ("Avenue", "Bridge", "Court", "Crescent", "Dock", "Gate", "Grove", "Hall", "House", "Lane", "Market",
             "Mews", "Parade", "Place", "Quay", "Road", "Row", "Square", "Street", "Terrace", "Walk", "Yard"),
        ),
        queries=(
            "To reach {key}, please dial {value}.",
            "Calls for {key} are put through on {value}.",
            "{value} is still what {key} answers to.",
            "If {key} does not pick up, try {value} once more.",
            "Yesterday {key} was rung twice, both times on {value}.",
            "Messages left at {value} go to the people in {key}.",
        ),
        idle=(
            ("Maintenance staff", "Our new colleagues", "Two electricians", "Several guests", "The postal service",
             "A delegation from abroad", "Students on a tour", "The canteen team"),
            ("will be moving furniture", "are expected to arrive", "had some trouble parking", "held a short meeting",
             "asked for better lighting", "will repaint the doors", "left a note of thanks", "took photographs"),
            ("early next week", "before the holidays", "after lunch", "during the fire drill", "despite the heat",
             "as soon as the lift works", "late in the evening", "without any hurry"),
        ),
    ),
}  # fmt: skip


def _table(page: _Page, draw: _Draw, words: _TableWords) -> None:
    """Registers one after the other; the keys of each are queried in shuffled order, a few older ones among them."""
    keys = iter(draw.shuffled([f"{first} {second}" for first in words.keys[0] for second in words.keys[1]]))
    values = iter(draw.shuffled(range(1000, 10000)))
    known: dict[str, int] = {}
    register = 0
    while not page.full:
        fresh = {next(keys): next(values) for _ in range(draw.between(16, 22))}
        title = draw.pick(words.titles).format(number=_ORDINALS[register % len(_ORDINALS)])
        lines = [words.line.format(key=key, value=value) for key, value in fresh.items()]
        page.paragraph(title)
        page.paragraph(words.heading, *lines)
        page.paragraph(" ".join(_idle(draw, words) for _ in range(draw.between(6, 9))))
        older = draw.shuffled(list(known))[:6]
        known |= fresh
        asked = draw.shuffled([*fresh, *older])
        while asked and not page.full:
            some, asked = asked[:5], asked[5:]
            sentences = [draw.pick(words.queries).format(key=key, value=known[key]) for key in some]
            page.paragraph(" ".join([*sentences, _idle(draw, words)]))
        register += 1


def _idle(draw: _Draw, words: _TableWords) -> str:
    return " ".join(draw.pick(part) for part in words.idle) + "."


# ---- traces


@dataclass(frozen=True)
class _TraceWords:
    opening: str
    names: Sequence[str]  # eight
    start: str  # {name}, {new}
    assign: str  # {n}, {name}, {old}, {new}
    add: str  # and {by}
    copy: str  # and {source}
    restate: str  # {name}, {value}; follows the step on its line


_TRACES = {
    "a": _TraceWords(
        opening="Eight jars stand on a shelf, each holding some beads.",
        names=("oak", "pine", "elm", "ash", "fig", "palm", "yew", "plum"),
        start="The {name} jar holds {new}.",
        assign="Step {n}: the {name} jar is emptied of its {old} beads and filled with {new}.",
        add="Step {n}: {by} beads join the {old} in the {name} jar, which makes {new}.",
        copy="Step {n}: the {name} jar, so far {old}, is matched to the {source} jar and holds {new}.",
        restate=" There are still {value} in the {name} jar.",
    ),
    "b": _TraceWords(
        opening="# trace of a run: all variables are integers",
        names=("alpha", "beta", "gamma", "delta", "kappa", "sigma", "theta", "omega"),
        start="{name} = {new}",
        assign="[{n}] {name} := {new} (was {old})",
        add="[{n}] {name} := {old} + {by} = {new}",
        copy="[{n}] {name} := {source} = {new} (was {old})",
        restate="; unchanged: {name} == {value}",
    ),
}


def _trace(page: _Page, draw: _Draw, words: _TraceWords) -> None:
    """Steps that set, raise or copy a variable, and mostly restate one that was not mentioned for long."""
    state = {name: draw.between(10, 99) for name in draw.shuffled(words.names)}
    page.paragraph(words.opening, *(words.start.format(name=name, new=value) for name, value in state.items()))
    stale = list(state)  # names, the longest unmentioned first
    n = 0
    while not page.full:
        n += 1
        name = stale[draw.below(6)]
        source = draw.pick([other for other in state if other != name])
        by, fresh = draw.between(2, 19), draw.between(10, 99)
        choices = [(words.assign, fresh), (words.add, state[name] + by), (words.copy, state[source])]
        template, new = draw.pick(choices if state[name] + by < 100 else choices[::2])
        line = template.format(n=n, name=name, old=state[name], new=new, by=by, source=source)
        state[name] = new
        mentioned = [name, source] if template is words.copy else [name]
        stale = [other for other in stale if other not in mentioned] + mentioned
        if draw.below(3):
            other = stale[draw.below(3)]
            line += words.restate.format(name=other, value=state[other])
            stale = [left for left in stale if left != other] + [other]
        page.line(line)


# ---- arithmetic


@dataclass(frozen=True)
class _SumWords:
    opening: str
    start: str  # {n}, {new}
    add: str  # {n}, {i}, {x}, {j}, {y}, {new}
    subtract: str
    shift: str  # {n}, {i}, {x}, {by}, {new}


_SUMS = {
    "a": _SumWords(
        opening="We compute one number a line, and later lines use the results of earlier ones.",
        start="Line {n} starts from {new}.",
        add="Line {n} takes {x} from line {i} and {y} from line {j}; together they are {new}.",
        subtract="Line {n} takes {x} from line {i} less {y} from line {j}, which leaves {new}.",
        shift="Line {n} takes {x} from line {i} and adds {by}, giving {new}.",
    ),
    "b": _SumWords(
        opening="Worked solution, all results in whole numbers",
        start="({n}) given: {new}",
        add="({n}) = ({i}) + ({j}) = {x} + {y} = {new}",
        subtract="({n}) = ({i}) - ({j}) = {x} - {y} = {new}",
        shift="({n}) = ({i}) + {by} = {x} + {by} = {new}",
    ),
}

_NEAREST_REFERENCE = 6  # lines back, once there are that many: nearer results would be easy to keep


def _arithmetic(page: _Page, draw: _Draw, words: _SumWords) -> None:
    """Lines that add, subtract or shift the results of lines at least `_NEAREST_REFERENCE` back, within 10 to 999."""
    results = [draw.between(10, 199) for _ in range(8)]
    page.paragraph(words.opening, *(words.start.format(n=n, new=new) for n, new in enumerate(results, 1)))
    while not page.full:
        reach = max(len(results) - _NEAREST_REFERENCE, 2)
        i = draw.below(reach)
        j = (i + draw.between(1, reach - 1)) % reach  # any other line
        x, y, by = results[i], results[j], draw.between(3, 49)
        template, new = draw.pick([(words.add, x + y), (words.subtract, x - y), (words.shift, x + by)])
        if not 10 <= new <= 999:
            continue
        page.line(template.format(n=len(results) + 1, i=i + 1, x=x, j=j + 1, y=y, by=by, new=new))
        results.append(new)
