"""How many tokens a KV head may hold, and when it has to choose.

Knows only integers. A budget says nothing about *which* tokens stay; that is a policy's business.
"""

import operator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Budget:
    """The number of tokens that every KV head of a layer holds.

    `interval` tells the two kinds of policy apart:

    * **Entry policies** (`interval = 0`) decide before query q attends. The window is `(q - window, q]`, the current
      token included; the token that has just left it competes for the `topk` long-range places. From `q = rest` on,
      every query makes one decision, and no query ever sees more than `rest` tokens.
    * **Attention policies** (`interval = L >= 1`) let the cache grow from `rest` to `rest + L` tokens and then drop L
      of them at once, at the start of query `q = rest + t L`, t = 1, 2, ... They judge by the attention of the queries
      before q and never drop one of the newest `window` tokens.

    Args:
        sinks: first tokens of a sequence, which always stay.
        window: newest tokens, which always stay.
        topk: places for the tokens in between that the policy ranks highest.
        interval: tokens between two evictions of an attention policy; 0 for an entry policy.

    Raises:
        ValueError: where a number is not an integer, is too small, or an entry policy has no window (the current
            token is part of it).

    Example:
        >>> budget = Budget(sinks=4, window=32, topk=92)
        >>> budget.rest, budget.slots
        (128, 128)
        >>> Budget(sinks=0, window=32, topk=64, interval=32).slots
        128
    """

    sinks: int = 4
    window: int = 32
    topk: int = 92
    interval: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ValueError(f"{self}: {field.name} must be an integer, got {value!r}")
            object.__setattr__(self, field.name, operator.index(value))
        for name, least in (("sinks", 0), ("window", 0), ("topk", 1), ("interval", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{self}: {name} must be at least {least}, got {getattr(self, name)}")
        if self.interval == 0 and self.window < 1:
            raise ValueError(
                f"{self}: with interval 0 the window must be at least 1, got {self.window}: it holds the current token"
            )

    @property
    def rest(self) -> int:
        """Tokens held after an eviction."""
        return self.sinks + self.window + self.topk

    @property
    def slots(self) -> int:
        """Tokens held at most, the hard bound: what a user's `--budget` counts."""
        return self.rest + self.interval

    @property
    def as_entry(self) -> "Budget":
        """The budget of an entry policy that would choose from the same tokens, and keep as many of them.

        An attention policy drops before its query enters: its newest `window` tokens do not include the current one,
        which the window of an entry policy does.

        Example:
            >>> Budget(sinks=0, window=32, topk=64, interval=32).as_entry
            Budget(sinks=0, window=33, topk=64, interval=0)
        """
        return Budget(self.sinks, self.window + 1, self.topk) if self.interval else self

    def eviction_queries(self, length: int) -> range:
        """The queries of a sequence of `length` tokens at whose start something is evicted.

        `rest, rest + 1, ...` for an entry policy, `rest + L, rest + 2 L, ...` for an attention policy. An eviction
        after the last token would change nothing and is not counted.
        """
        return range(self.slots, length, max(self.interval, 1))

    def evictions(self, length: int) -> int:
        """How often a sequence of `length` tokens evicts.

        For an attention policy `max(0, ceil((length - rest) / L) - 1)`, the M of ForesightKV (arXiv 2602.03203).

        Example:
            >>> Budget(sinks=0, window=256, topk=768, interval=256).evictions(4096)
            11
        """
        return len(self.eviction_queries(length))
