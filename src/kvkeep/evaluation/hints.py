"""Episodes in which only a later token tells which of the last few tokens will be needed: what a delayed scorer is for.

An episode is a row of tokens of a small vocabulary, all of the same length::

    <start>  block  block ... block  filler x gap  ask answer ask answer ...

A block is ``copies`` items of each of ``colours`` colours, in random order, and one hint. An item is one token that
binds a key, unique in the episode, to a value; a value has a colour. A hint names a colour: the items of its own block
that have it will be asked for, each once, at the very end; all others never are. So

* at the item nothing in the past tells whether it will be needed: hints are drawn independently of all else;
* at most ``colours * copies`` tokens later, within the window, the hint has told;
* the hint names neither key nor value, and a question names neither value nor colour: whoever lost the item cannot
  answer better than by guessing.

Knows arrays only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Token(NamedTuple):
    """What a token means: ``what`` is start, filler, item, hint, ask or answer.

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
        colours: of items; a hint names one.
        copies: items of a colour in a block.
        shades: values of a colour.
        gap: filler tokens between the last block and the first question.
        fillers: kinds of filler token.

    Raises:
        ValueError: for a size below 1.

    Example:
        >>> task = Hints(blocks=1, colours=2, copies=1, shades=1, gap=1, fillers=1)
        >>> [task.describe(token).what for token in task.episodes(1, seed=0)[0]]
        ['start', 'item', 'item', 'hint', 'filler', 'ask', 'answer']
    """

    blocks: int = 4
    colours: int = 4
    copies: int = 2
    shades: int = 4
    gap: int = 9
    fillers: int = 8

    def __post_init__(self) -> None:
        for name in ("blocks", "colours", "copies", "shades", "gap", "fillers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def block(self) -> int:
        """Items of a block."""
        return self.colours * self.copies

    @property
    def window(self) -> int:
        """The window with which an item leaves when its own hint is the last that came."""
        return self.block + 1

    @property
    def keys(self) -> int:
        return self.blocks * self.block

    @property
    def values(self) -> int:
        return self.colours * self.shades

    @property
    def questions(self) -> int:
        """Of an episode."""
        return self.blocks * self.copies

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
        """Tokens there are: start, fillers, items, hints, ask, answer, in this order."""
        return self._first("answer") + self.values

    def episodes(self, count: int, seed: int, blocks: int | None = None, ask_all: bool = False) -> np.ndarray:
        """Draw episodes.

        Args:
            count: how many.
            seed: equal seeds draw equal episodes.
            blocks: shorter episodes, to learn from; None = all.
            ask_all: ask for every item, hinted at or not, to learn from.

        Returns:
            int64 ``[count, length]``.
        """
        rng = np.random.default_rng(seed)
        shape = (count, blocks or self.blocks, self.block)
        items = shape[1] * shape[2]
        key = rng.permuted(np.broadcast_to(np.arange(self.keys), (count, self.keys)), axis=-1)
        key = key[:, :items].reshape(shape)
        colour = rng.permuted(np.broadcast_to(np.arange(self.block) % self.colours, shape), axis=-1)
        value = colour * self.shades + rng.integers(self.shades, size=shape)
        hint = rng.integers(self.colours, size=(*shape[:2], 1))
        kept = colour == hint
        told = np.concatenate([self._first("item") + key * self.values + value, self._first("hint") + hint], -1)
        asked = np.ones_like(kept) if ask_all else kept
        pairs = np.stack([self._first("ask") + key, self._first("answer") + value], -1)[asked].reshape(count, -1, 2)
        order = rng.permuted(np.broadcast_to(np.arange(pairs.shape[1]), pairs.shape[:2]), axis=-1)
        talk = np.take_along_axis(pairs, order[..., None], 1)
        filler = self._first("filler") + rng.integers(self.fillers, size=(count, self.gap))
        parts = [np.zeros((count, 1), np.int64), told.reshape(count, -1), filler, talk.reshape(count, -1)]
        return np.concatenate(parts, -1)

    def items_asked(self, episodes: np.ndarray) -> np.ndarray:
        """Where the items lie that are asked for, in the order of the questions.

        Args:
            episodes: ``[n, length]``, whole ones.

        Returns:
            int64 ``[n, questions]``.
        """
        key = (episodes - self._first("item")) // self.values  # of what is an item
        is_item = (episodes >= self._first("item")) & (episodes < self._first("hint"))
        asked = episodes[:, list(self.asked_at)] - self._first("ask")
        return ((key[:, None] == asked[..., None]) & is_item[:, None]).argmax(-1)

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
        if what == "hint":
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
            "hint": self.colours,
            "ask": self.keys,
            "answer": self.values,
        }

    def _first(self, what: str) -> int:
        """The first token of a kind."""
        sizes = self._sizes()
        return sum(sizes[kind] for kind in list(sizes)[: list(sizes).index(what)])
