"""What a wording consists of. Knows nothing of how documents are drawn.

Every template is a sequence: one of its members is drawn each time. Templates may format their fields, like
``{n:04x}``; a table's values may be numbers or words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TableWords:
    titles: Sequence[str]  # {number} is the number of the register, in words
    heading: str
    lines: Sequence[str]  # {key}, {value}
    keys: tuple[Sequence[str], Sequence[str]]  # first and second word of a key
    queries: Sequence[str]  # {key}, {value}; neither digits nor another key besides
    idle: tuple[Sequence[str], Sequence[str], Sequence[str]]  # who, does what, where: sentences without a value
    values: Sequence[int | str] = range(1000, 10000)
    sizes: tuple[int, int] = (16, 22)  # keys of a register, at least and at most
    key_joint: str = " "  # between the words of a key
    line_gap: str = "\n"  # between the lines of a register
    sentence_gap: str = " "  # between queries and idle sentences
    idle_end: str = "."


@dataclass(frozen=True)
class TraceWords:
    opening: str
    names: Sequence[str]  # six or more
    start: Sequence[str]  # {name}, {new}
    assign: Sequence[str]  # {name}, {new} and, if it likes, {n}, {old}
    add: Sequence[str]  # and {by}
    copy: Sequence[str]  # and {source} instead
    restate: Sequence[str]  # {name}, {value}; follows the step on its line
    largest: int = 99


@dataclass(frozen=True)
class SumWords:
    opening: str
    start: Sequence[str]  # {n}, {new}
    add: Sequence[str]  # {n}, {i}, {x}, {j}, {y}, {new}
    subtract: Sequence[str]
    shift: Sequence[str]  # {n}, {i}, {x}, {by}, {new}
    largest: int = 999


@dataclass(frozen=True)
class Wording:
    table: TableWords
    trace: TraceWords
    arithmetic: SumWords
