"""Episodes in which only a later token tells which of the last few tokens will be needed: what a delayed scorer is for.

An episode is a row of tokens of a small vocabulary, all of the same length::

    <start>  block  block ... block  filler x gap  ask answer ask answer ...

A block is ``colours`` items, one of every colour, then ``colours`` hints, one of every colour, both in random order.
An item is one token that binds a key, unique in the episode, to a value; a value has a colour. A hint is "keep c" or
"drop c" and speaks of the item of colour c in its own block. Kept items are asked for, each once, at the very end;
dropped ones never are. So

* at the item nothing in the past tells whether it will be needed: the kept places are drawn independently of all else,
  the same number in every block;
* at most ``2 * colours - 1`` tokens later, within a window of ``2 * colours``, a hint has told;
* the hint names neither key nor value, and a question names neither value nor colour: whoever lost the item cannot
  answer better than by guessing.

Knows arrays only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Token(NamedTuple):
    """What a token means: ``what`` is start, filler, item, keep, drop, ask or answer.

    Attributes:
        what: the kind.
        key: of an item or a question, else None.
        value: of an item or an answer, else None.
        colour: of whatever has one, else None.
    """

    what: str
    key: int | None = None
    value: int | None = None
    colour: int | None = None


@dataclass(frozen=True)
class Hints:
    """The task, its vocabulary and a generator of episodes.

    Args:
        blocks: in an episode.
        colours: items of a block.
        shades: values of a colour.
        kept: items of a block that will be asked for.
        gap: filler tokens between the last block and the first question.
        fillers: kinds of filler token.

    Raises:
        ValueError: for a size below 1, or more kept items than there are in a block.

    Example:
        >>> task = Hints(blocks=1, colours=2, shades=1, kept=1, gap=1, fillers=1)
        >>> [task.describe(token).what for token in task.episodes(1, seed=0)[0]]
        ['start', 'item', 'item', 'keep', 'drop', 'filler', 'ask', 'answer']
    """

    blocks: int = 6
    colours: int = 8
    shades: int = 2
    kept: int = 2
    gap: int = 16
    fillers: int = 8

    def __post_init__(self) -> None:
        for name in ("blocks", "colours", "shades", "kept", "gap", "fillers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.kept > self.colours:
            raise ValueError(f"a block of {self.colours} items cannot keep {self.kept}")

    @property
    def window(self) -> int:
        """The least window that has seen an item's own hint, and no later one of its colour, when the item leaves."""
        return 2 * self.colours

    @property
    def keys(self) -> int:
        return self.blocks * self.colours

    @property
    def values(self) -> int:
        return self.colours * self.shades

    @property
    def questions(self) -> int:
        """Of an episode."""
        return self.blocks * self.kept

    @property
    def length(self) -> int:
        """Tokens of an episode."""
        return 1 + self.blocks * self.window + self.gap + 2 * self.questions

    @property
    def asked_at(self) -> range:
        """Positions of the questions; each answer is the next token."""
        return range(self.length - 2 * self.questions, self.length, 2)

    @property
    def vocabulary(self) -> int:
        """Tokens there are: start, fillers, items, keep, drop, ask, answer, in this order."""
        return self._first("answer") + self.values

    def episodes(self, count: int, seed: int) -> np.ndarray:
        """Draw episodes.

        Args:
            count: how many.
            seed: equal seeds draw equal episodes.

        Returns:
            int64 ``[count, length]``.
        """
        rng = np.random.default_rng(seed)
        shape = (count, self.blocks, self.colours)
        places = np.broadcast_to(np.arange(self.colours), shape)
        key = rng.permuted(np.broadcast_to(np.arange(self.keys), (count, self.keys)), axis=-1).reshape(shape)
        colour = rng.permuted(places, axis=-1)
        value = colour * self.shades + rng.integers(self.shades, size=shape)
        kept = rng.permuted(places, axis=-1) < self.kept
        items = self._first("item") + key * self.values + value
        hints = np.where(kept, self._first("keep"), self._first("drop")) + colour
        hints = rng.permuted(hints, axis=-1)
        blocks = np.concatenate([items, hints], -1).reshape(count, -1)
        needed = rng.permuted(np.broadcast_to(np.arange(self.questions), (count, self.questions)), axis=-1)
        key, value = (
            np.take_along_axis(each[kept].reshape(count, self.questions), needed, -1) for each in (key, value)
        )
        talk = np.stack([self._first("ask") + key, self._first("answer") + value], -1).reshape(count, -1)
        filler = self._first("filler") + rng.integers(self.fillers, size=(count, self.gap))
        return np.concatenate([np.zeros((count, 1), np.int64), blocks, filler, talk], -1)

    def describe(self, token: int) -> Token:
        """What a token means.

        Raises:
            ValueError: for a token outside the vocabulary.
        """
        if not 0 <= token < self.vocabulary:
            raise ValueError(f"token {token} is not one of {self.vocabulary}")
        what = [kind for kind in self._sizes() if self._first(kind) <= token][-1]
        rest = int(token) - self._first(what)
        if what == "item":
            key, value = divmod(rest, self.values)
            return Token(what, key, value, value // self.shades)
        if what in ("keep", "drop"):
            return Token(what, colour=rest)
        if what == "ask":
            return Token(what, key=rest)
        return Token(what, value=rest, colour=rest // self.shades) if what == "answer" else Token(what)

    def _sizes(self) -> dict[str, int]:
        """Kinds of token in the order of the vocabulary, and how many there are of each."""
        return {
            "start": 1,
            "filler": self.fillers,
            "item": self.keys * self.values,
            "keep": self.colours,
            "drop": self.colours,
            "ask": self.keys,
            "answer": self.values,
        }

    def _first(self, what: str) -> int:
        """The first token of a kind."""
        sizes = self._sizes()
        return sum(sizes[kind] for kind in list(sizes)[: list(sizes).index(what)])
