"""Trajectories of ForesightKV's second stage: what was drawn at every eviction of a text, and what it cost.

Eviction is a Markov decision process over a trace (arXiv 2602.03203, section 3): a state is what a layer holds, an
action the ordered draw of L candidates from the pool of those with the lowest keep scores, and the text goes on as it
does whatever is drawn. A group of trajectories is G rows of one batch, so the language model runs once for all of them;
what the scorer has read of every pool is written down, and nothing after that needs the model again.

Knows trajectories and rewards; nothing of objectives and optimisers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.budget import Budget
from kvkeep.policies.base import Held
from kvkeep.policies.foresightkv import ForesightKV
from kvkeep.policies.full import Full
from kvkeep.runtime.cache import EvictingCache, cache_keyword
from kvkeep.runtime.replay import kvkeep_attention, replay, token_losses
from kvkeep.scorers import Scorer
from kvkeep.slots import gather_slots, lowest
from kvkeep.training.corpus import Texts
from kvkeep.training.losses import rewards_to_go, spike_reward
from kvkeep.training.team import Team


def seed_of(*parts: int | str) -> int:
    """64 bits from a hash of ``parts``, so that a run that is resumed draws what it would have drawn."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def consequential(budget: Budget, length: int) -> int:
    """How many evictions of a text of ``length`` tokens can change the loss of one of its tokens.

    One at the last token's own query comes too late, and would be credited with what it has not done.
    """
    return max((length - 2 - budget.rest) // budget.interval, 0)


@dataclass(frozen=True)
class Task:
    """One document at one budget."""

    name: str
    document: int  # which it is, of those that it is among
    ids: Tensor  # [T]
    budget: Budget

    @property
    def key(self) -> str:
        return json.dumps([self.ids.tolist(), asdict(self.budget)])


def tasks(documents: Texts, budgets: Sequence[Budget]) -> list[Task]:
    """Every document at every budget."""
    return [
        Task(document.name, number, ids, budget)
        for number, (document, ids) in enumerate(documents)
        for budget in budgets
    ]


class Recorder(ForesightKV):
    """ForesightKV's draw, with a seed for every row, that writes down what it draws from.

    Args:
        budget, scorer, pool: as :class:`~kvkeep.policies.foresightkv.ForesightKV`.
        seeds: one for every row of the batch.
        listed: "pool" = features of the pool; "candidates" = of all that could go, pool or not.
        chosen: which evictions, counted from 0; None = all.
        length: of the text, see :func:`consequential`.
    """

    def __init__(
        self,
        budget: Budget,
        scorer: Scorer,
        seeds: Sequence[int],
        length: int,
        pool: int | None = 2,
        listed: str = "pool",
        chosen: Collection[int] | None = None,
    ):
        super().__init__(budget, scorer, evict="sample", pool=pool, seed=list(seeds))
        numbers = range(consequential(budget, length))
        self._wanted = set(numbers) if chosen is None else set(numbers) & set(chosen)
        self._listed = listed
        self._store = next(scorer.parameters()).device
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> (features, order) by eviction

    def keep_scores(self, held: Held) -> Tensor:
        features = self.inputs(held)  # [G, H, N, width]
        scores = self.layer_scorer(held.geometry, held.keys.device).keep(features)
        drawn = self.draw(scores, held)
        if held.evictions in self._wanted:
            listed = drawn.pool  # [G, H, C], slots
            if self._listed == "candidates":
                listed = lowest(scores, held.positions, held.candidates, int(held.candidates[0, 0].sum()))
            places = torch.arange(listed.shape[-1], device=listed.device).expand_as(listed)
            place_of = torch.zeros_like(held.positions, dtype=torch.int64).scatter_(-1, listed, places)
            parts = gather_slots(features, listed), place_of.gather(-1, drawn.order)
            self._seen.setdefault(held.geometry.layer, []).append(tuple(part.to(self._store) for part in parts))
        return torch.ones_like(scores).scatter_(-1, drawn.order, 0.0)

    def decisions(self) -> dict[int, Decisions]:
        """Everything written down, by layer; asked for once, since it is not kept twice."""
        found = {}
        for layer in list(self._seen):
            features, order = (torch.stack(parts, 1) for parts in zip(*self._seen.pop(layer), strict=True))
            found[layer] = Decisions(features, order)
        return found


@dataclass
class Decisions:
    """M evictions of all heads of a layer, in G trajectories.

    Attributes:
        features: ``[G, M, H, C, width]`` of the pool (or all candidates), the lowest keep score of the scorer that drew
            first; float32, or wider where the model is.
        order: int64 ``[G, M, H, L]``, which of the C went, in the order they were drawn.
    """

    features: Tensor
    order: Tensor


class Rewards(NamedTuple):
    """Of G trajectories: ``[G]``, and of it what comes after each of M recorded evictions ``[G, M]``."""

    whole: Tensor
    to_go: Tensor


@dataclass
class Trajectories:
    """A group: G ways to evict along one text.

    Attributes:
        decisions: by layer.
        token_loss: ``[G, T - 1]`` nats, under these evictions.
    """

    decisions: dict[int, Decisions]
    token_loss: Tensor

    @property
    def tokens(self) -> int:
        """How many went through the model."""
        return self.token_loss.shape[0] * (self.token_loss.shape[1] + 1)


def roll_out(
    model: PreTrainedModel,
    scorer: Scorer,
    ids: Tensor,
    budget: Budget,
    seeds: Sequence[int],
    pool: int | None = 2,
    listed: str = "pool",
    chosen: Collection[int] | None = None,
    rows: int | None = None,
) -> Trajectories:
    """Evict along a text once for every seed, in one forward of the model.

    Args:
        model: the frozen backbone.
        scorer: the one that acts.
        ids: ``[T]``.
        budget: with an interval.
        seeds: of the G trajectories.
        pool, listed, chosen: see :class:`Recorder`; ``chosen=()`` writes nothing down.
        rows: trajectories in a forward, for models whose memory does not hold G rows; None = all.
    """
    parts = []
    for first in range(0, len(seeds), rows or len(seeds)):
        some = seeds[first : first + (rows or len(seeds))]
        policy = Recorder(budget, scorer, some, len(ids), pool, listed, chosen)
        loss = token_losses(model, ids.to(model.device).expand(len(some), -1), policy)
        parts.append((policy.decisions(), loss))
    decisions = parts[0][0]
    if len(parts) > 1:
        for layer, first in decisions.items():
            its = [first, *(each[layer] for each, _ in parts[1:])]
            decisions[layer] = Decisions(torch.cat([d.features for d in its]), torch.cat([d.order for d in its]))
    return Trajectories(decisions, torch.cat([loss for _, loss in parts]))


@dataclass
class Unevicted:
    """What the full cache says of a text: ``[T - 1]`` nats each, entry p of the prediction of token p + 1."""

    token_loss: Tensor
    entropy: Tensor


class FullCache:
    """Losses and entropies of the model with its full cache: one replay a text, kept for all epochs.

    Both are measured here, never read from a data set: a column that is off by one, or an entropy replaced by a loss,
    would go unnoticed.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._known: dict[str, Unevicted] = {}

    def __call__(self, ids: Tensor, remember: bool = True) -> Unevicted:
        """Of a text ``[T]``; ``remember=False`` for one that does not come again."""
        key = hashlib.blake2b(ids.cpu().contiguous().numpy().tobytes()).hexdigest()
        if key in self._known:
            return self._known[key]
        run = replay(self.model, ids.to(self.model.device)[None], Full())
        found = Unevicted(run.token_loss[0], run.entropy[0])
        if remember:
            self._known[key] = found
        return found


def require_writing(model: PreTrainedModel, policy: ForesightKV) -> None:
    """Raise ValueError where the model cannot generate under the policy, see :class:`~kvkeep.EvictingCache`."""
    with kvkeep_attention(model):
        EvictingCache(model.config, policy)


@torch.no_grad()
def write_text(
    model: PreTrainedModel, prompt: Tensor, length: int, policy: ForesightKV, temperature: float, seed: int
) -> Tensor:
    """Let the model go on under a policy's evictions, so that a text is one that the policy leads to.

    Args:
        model: the frozen backbone.
        prompt: ``[n]``, at most the budget's slots.
        length: of prompt and continuation; an end of text is never drawn.
        policy: with the seed of one row.
        temperature: of the draws, above 0.
        seed: of the draws.

    Returns:
        int64 ``[length]``, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    ends = [] if ends is None else torch.tensor(ends).reshape(-1).tolist()
    text = prompt.cpu().tolist()
    new = text
    with kvkeep_attention(model):
        cache = EvictingCache(model.config, policy, padding=0)
        while len(text) < length:
            ids = torch.tensor([new], device=model.device)
            logits = model(ids, **{cache_keyword(model): cache}, use_cache=True).logits[0, -1].double().cpu()
            logits[ends] = -torch.inf
            new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).tolist()
            text = text + new
    return torch.tensor(text)


class Measured(NamedTuple):
    """One trace: the mean reward of the fixed draws, and losses in nats with the lowest scores going, and full."""

    reward: float | None
    loss: float
    full_loss: float


class Rules(Protocol):
    """What of a schedule decides a rollout; see :class:`kvkeep.training.reinforce.Schedule`."""

    group: int
    rollout: str
    temperature: float
    rows: int | None
    pool: int | None
    logprob: str
    variant: str
    eta: float
    low: float
    reduction: str


class Rollouts:
    """The model as an environment: texts, trajectories along them, and their rewards.

    Args:
        model: the frozen backbone.
        rules: what is drawn and what is rewarded.
        team: with whom measurements are shared.
        seed: of the draws that scorers are compared by.
    """

    def __init__(self, model: PreTrainedModel, rules: Rules, team: Team, seed: int):
        self.model, self.rules, self.team, self.full = model, rules, team, FullCache(model)
        self.fixed_seeds = [seed_of(seed, "measure", member) for member in range(rules.group)]

    def text(self, scorer: Scorer, task: Task, evictions: int, drawn: int) -> Tensor:
        """What a group evicts along: the trace, or what the model writes.

        Args:
            scorer: the one that acts.
            task: whose first ``slots`` tokens the model goes on from.
            evictions, drawn: seeds of the evictions under which it writes, and of what it writes.
        """
        if self.rules.rollout == "trace":
            return task.ids
        policy = ForesightKV(task.budget, scorer, "sample", self.rules.pool, [evictions])
        prompt = task.ids[: task.budget.slots]
        return write_text(self.model, prompt, len(task.ids), policy, self.rules.temperature, drawn)

    def group(
        self,
        scorer: Scorer,
        ids: Tensor,
        budget: Budget,
        seeds: Sequence[int],
        chosen: Collection[int] | None = None,
        remember: bool = True,
    ) -> tuple[Trajectories, Rewards | None]:
        """Trajectories of a text ``[T]`` with their rewards, None where it has no token to read.

        Args: as :func:`roll_out`; ``remember=False`` for a text that does not come again.
        """
        rules = self.rules
        listed = "candidates" if rules.logprob == "independent" else "pool"
        run = roll_out(self.model, scorer, ids, budget, seeds, rules.pool, listed, chosen, rules.rows)
        full = self.full(ids, remember)
        options = {name: getattr(rules, name) for name in ("eta", "low", "reduction", "variant")}
        parts = spike_reward(full.token_loss, run.token_loss, full.entropy, budget.slots, by_entry=True, **options)
        if parts is None:
            return run, None
        made = sorted(range(consequential(budget, len(ids))) if chosen is None else chosen)
        return run, Rewards(parts.sum(-1), rewards_to_go(parts, [budget.interval * number for number in made]))

    def rewards(self, traces: Sequence[Task], seeds: Sequence[int], scorer: Scorer) -> list[float | None]:
        """The mean reward of draws along every trace, the same draws for the same seeds whatever else is asked.

        Args:
            traces: whose own text is evicted along, also where training lets the model write.
            seeds: one a draw.
            scorer: the one that acts.

        Returns:
            One number a trace, None for one that has no token to read.
        """
        found = []
        for task in self.team.share(traces):
            own = [seed_of(seed, task.key) for seed in seeds]
            rewards = self.group(scorer, task.ids, task.budget, own, chosen=())[1]
            found.append(None if rewards is None else float(rewards.whole.mean()))
        return self.team.joined(found)

    def measured(self, traces: Sequence[Task], scorer: Scorer) -> list[Measured]:
        """Rewards of the fixed draws, and losses with the lowest scores going, of every trace."""
        found = []
        for task in self.team.share(traces):
            run = replay(self.model, task.ids.to(self.model.device)[None], ForesightKV(task.budget, scorer))
            columns = run.token_loss[0], self.full(task.ids).token_loss
            found.append(tuple(float(column[task.budget.slots :].double().sum()) for column in columns))
        rewards = self.rewards(traces, self.fixed_seeds, scorer)
        return [Measured(reward, *sums) for reward, sums in zip(rewards, self.team.joined(found), strict=True)]
