"""ForesightKV's second stage: draws that spare the model surprises become more likely.

Paper: ForesightKV, arXiv 2602.03203. A step takes a few traces and draws G trajectories of each. A trajectory is
rewarded for the loss spikes it avoids where the full cache is sure, compared with the others of its group (GRPO), and
the scorer, nothing else, is moved by clipped ratios of exact Plackett-Luce probabilities and the KL to the scorer it
began as. Deviations from the released code: the probability is that of the ordered draw from the pool it was made from
(there: independent draws from all candidates; ``logprob="independent"``), the group is an option (there: the number
of devices), and groups whose rewards are equal are left out and counted.

With ``torch.distributed`` initialised, every process takes its share of a step's traces and gradients are averaged over
all groups, so the result does not depend on how many there are, up to the order of a sum. Processes share a disk.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.budget import Budget
from kvkeep.evaluation.statistics import Interval
from kvkeep.policies.foresightkv import ForesightKV
from kvkeep.scorers import Scorer
from kvkeep.training import losses
from kvkeep.training.corpus import Texts
from kvkeep.training.gains import compared
from kvkeep.training.loop import Group, Loop, Progress
from kvkeep.training.reinforce_schedule import Schedule
from kvkeep.training.rollout import (
    Decisions,
    Rollouts,
    Task,
    Trajectories,
    consequential,
    require_writing,
    seed_of,
    tasks,
)
from kvkeep.training.state import load_state
from kvkeep.training.team import Team

LEVEL = 1e-6  # rewards closer than this, relative to the larger of 1 and them, are equal: rounding teaches nothing


@dataclass
class Lesson:
    """A group that is learned from."""

    trajectories: Trajectories
    advantage: Tensor  # [G], or [G, M] where every eviction has its own
    old: dict[int, Tensor] = field(default_factory=dict)  # layer -> log-probabilities under the scorer that drew


TALLIED = ("groups", "rewarded", "skipped", "reward", "spread", "tokens", "passes", "loss", "kl", "clipped", "entropy")


class Reinforce(Loop):
    """A scorer being reinforced; ``run`` does everything.

    Args:
        model: the frozen backbone.
        scorer: a trained one of ForesightKV, moved in place; as it is given (also to a run that is resumed) it is the
            reference of the KL.
        train, held_out: pairs of a document and its ids ``[T]``; none of the latter means no held-out evaluation.
        schedule: how.
        folder: state, log and ``rewards.json`` live here.
        budgets: with an interval; None = the scorer's.
        resume, seed, progress: see :class:`~kvkeep.training.loop.Loop`; the seed is that of all draws too.

    Raises:
        ValueError: where there is nothing to train on, a budget has no interval, or no document is long enough.
    """

    stage = "rl"

    def __init__(
        self,
        model: PreTrainedModel,
        scorer: Scorer,
        train: Texts,
        held_out: Texts,
        schedule: Schedule,
        folder: Path,
        budgets: Sequence[Budget] | None = None,
        resume: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ):
        budgets = scorer.budgets if budgets is None else budgets
        if any(budget.interval < 1 for budget in budgets):
            raise ValueError("evictions are drawn every interval: a budget without one cannot be reinforced")
        self.scorer, self.folder = scorer, folder
        self.train, self.held_out = tasks(train, budgets), tasks(held_out, budgets)
        short = [task for task in self.train + self.held_out if not consequential(task.budget, len(task.ids))]
        if short or not self.train:
            raise ValueError(
                f"{short[0].name} is too short for an eviction to matter" if short else "there is nothing to train on"
            )
        if schedule.rollout == "generate":
            require_writing(model, ForesightKV(budgets[0], scorer))
        self.reference = copy.deepcopy(scorer).requires_grad_(False)
        self.team = Team()
        self.rollouts = Rollouts(model, schedule, self.team, seed)
        # A number added to all scores changes no probability: its gradient is rounding, which Adam would blow up.
        learns = [weight for name, weight in scorer.named_parameters() if not name.endswith(".b2")]
        leads = self.team.rank == 0
        super().__init__(
            torch.nn.ModuleDict({"scorer": scorer}),
            [Group(learns, schedule.lr)],
            schedule,
            folder if leads else folder / f"process-{self.team.rank}",
            resume and leads,
            seed,
            progress if leads else None,
        )
        self.team.wait()  # the first may be late: still writing, where a run was stopped and begun again in place
        state = folder / self.path.name
        if resume and not leads and state.exists():  # all go on from what the first has saved
            record = load_state(state, self.module, self.optimizer)
            self.step, self.best, self.waited = record["step"], record["best"], record["waited"]

    def run(self) -> dict[str, Interval]:
        """Reinforce to the end, and compare with the scorer it began as, draw for draw.

        Returns:
            Intervals over documents of the ``reward``, its ``reward_gain`` over the reference, the ``loss_ratio`` (the
            lowest scores go, nothing is drawn) and its ``loss_ratio_change``: held out, and with ``train_`` before
            their names on the traces that were trained on. Where no document has a reward, there is none. What every
            trace says is in ``folder / "rewards.json"``.
        """
        self.advance()
        found: dict[str, Interval] = {}
        record = {}
        for prefix, some in (("train_", self.train[: self.schedule.compare_on]), ("", self.held_out)):
            before, after = (self.rollouts.measured(some, scorer) for scorer in (self.reference, self.scorer))
            found |= {f"{prefix}{name}": value for name, value in compared(some, before, after).items()}
            record["train" if prefix else "held_out"] = [
                {"trace": task.name, "slots": task.budget.slots, "before": first._asdict(), "after": last._asdict()}
                for task, first, last in zip(some, before, after, strict=True)
            ]
        if self.team.rank == 0:
            beside = self.folder / "rewards.json.tmp"
            beside.write_text(json.dumps(record, indent=1))
            os.replace(beside, self.folder / "rewards.json")
        return found

    # ---- a step

    def update(self) -> dict[str, Any]:
        """Roll out and learn from it; no optimiser step where no group has anything to say."""
        schedule, tally = self.schedule, dict.fromkeys(TALLIED, 0.0)
        placed = list(enumerate(self.shuffled(self.train, schedule.batch, self.step)))
        groups: Iterable[Lesson] = self.groups(self.team.share(placed), tally)
        if schedule.epochs > 1:
            groups = list(groups)
        descent, updates = {"gradient_norm": None}, 0
        for _ in range(schedule.epochs):
            self.module.zero_grad(set_to_none=True)
            used = 0
            for group in groups:
                self.backward(group, tally)
                used += 1
            if self.average(used):
                descent, updates = self.descend(), updates + 1
        return self.told(tally) | descent | {"beta": schedule.beta_at(self.step), "updates": updates}

    def groups(self, placed: Sequence[tuple[int, Task]], tally: dict[str, float]) -> Iterator[Lesson]:
        """Groups with a reward that differs among their trajectories, one after the other."""
        for place, task in placed:
            own = [seed_of(self.seed, self.step, place, member) for member in range(self.schedule.group)]
            text = self.rollouts.text(self.scorer, task, own[0], seed_of(self.seed, self.step, place, "text"))
            drawn = self.chosen(task, place), self.schedule.rollout == "trace"
            trajectories, rewards = self.rollouts.group(self.scorer, text, task.budget, own, *drawn)
            tally["groups"] += 1
            tally["tokens"] += trajectories.tokens
            if rewards is not None:
                tally["rewarded"] += 1
                tally["reward"] += float(rewards.whole.mean())
                tally["spread"] += float(rewards.whole.std(correction=0))
            if rewards is None or level(rewards.whole):
                tally["skipped"] += 1
            else:
                to_go = rewards.to_go if self.schedule.credit == "to_go" else None
                yield Lesson(trajectories, losses.advantages(rewards.whole, to_go))
            if self.schedule.epochs == 1:
                trajectories.decisions.clear()  # before the next group's are made

    def chosen(self, task: Task, place: int) -> list[int] | None:
        """The evictions that are learned from."""
        if self.schedule.decisions is None:
            return None
        generator = torch.Generator().manual_seed(seed_of(self.seed, self.step, place, "decisions"))
        drawn = torch.randperm(consequential(task.budget, len(task.ids)), generator=generator)
        return drawn[: self.schedule.decisions].tolist()

    def backward(self, group: Lesson, tally: dict[str, float]) -> None:
        """Add the gradient of one group, a layer at a time: the mean over layers, trajectories, evictions and heads."""
        tally["passes"] += 1
        for layer, decisions in group.trajectories.decisions.items():
            loss, new, seen = self.objective(layer, decisions, group.advantage, group.old.get(layer))
            share = 1 / len(group.trajectories.decisions)
            (loss * share).backward()
            if self.schedule.epochs > 1:  # the first of them is made by the scorer that drew
                group.old.setdefault(layer, new)
            for name, value in seen.items():
                tally[name] += value * share

    def objective(
        self, layer: int, decisions: Decisions, advantage: Tensor, old: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """GRPO on the decisions of a layer with exact probabilities.

        Args:
            layer: index in the model.
            decisions: of G trajectories.
            advantage: ``[G]``, or ``[G, M]``.
            old: log-probabilities under the scorer that drew; None = it is this one, so that every ratio is 1.

        Returns:
            The loss, the log-probabilities (without a graph), and what the log says of them.
        """
        schedule, order = self.schedule, decisions.order
        logits = evict_logits(self.scorer, layer, decisions.features)  # [G, M, H, C]
        with torch.no_grad():
            reference = evict_logits(self.reference, layer, decisions.features)
        new = schedule.log_probability(logits, order)  # [G, M, H] or [G, M, H, L]
        old = new.detach() if old is None else old
        kl, beta = schedule.divergence(logits, reference, order), schedule.beta_at(self.step)
        weighted = kl if beta else torch.zeros_like(new)  # 0 times an overflow would be NaN
        each = advantage.to(new).view(*advantage.shape, *[1] * (new.dim() - advantage.dim()))
        loss = losses.grpo(new, old, None, each, schedule.ratio_clip, beta, kl=weighted)
        first = logits.detach().log_softmax(-1)
        new = new.detach()
        seen = {
            "loss": loss.detach(),
            "kl": kl.detach().mean(),
            "clipped": ((new - old).exp() - 1).abs().gt(schedule.ratio_clip).float().mean(),
            "entropy": -(first.exp() * first).sum(-1).mean(),
        }
        return loss, new, {name: float(value) for name, value in seen.items()}

    def average(self, used: int) -> int:
        """Make the gradients left by ``used`` groups here a mean over those of all processes; how many these are."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        total = int(self.team.add(torch.tensor([used], dtype=torch.int64, device=weights[0].device)))
        for weight in weights if total else ():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self.team.add(weight.grad).div_(total)
        return total

    def told(self, tally: dict[str, float]) -> dict[str, Any]:
        """What the log says of a step, over all processes; None where no group has anything to say of it."""
        device = next(self.scorer.parameters()).device
        summed = self.team.add(torch.tensor(list(tally.values()), dtype=torch.float64).to(device)).tolist()
        total = dict(zip(tally, summed, strict=True))
        per = {"reward": "rewarded", "spread": "rewarded"} | dict.fromkeys(
            ("loss", "kl", "clipped", "entropy"), "passes"
        )
        means = {name: total[name] / total[count] if total[count] else None for name, count in per.items()}
        return means | {name: int(total[name]) for name in ("groups", "skipped", "tokens")}

    def evaluate(self) -> dict[str, float]:
        """On held-out traces: the mean reward, and the loss ratio of the lowest scores going."""
        if not self.held_out:
            return {}
        found = self.rollouts.measured(self.held_out, self.scorer)
        rewards = [each.reward for each in found if each.reward is not None]
        ratio = sum(each.loss for each in found) / sum(each.full_loss for each in found)
        return {"reward": sum(rewards) / len(rewards) if rewards else 0.0, "loss_ratio": ratio}

    def goal(self, metrics: dict[str, float]) -> float:
        return -metrics["reward"]


def evict_logits(scorer: Scorer, layer: int, features: Tensor) -> Tensor:
    """``[G, M, H, C, width]`` -> ``[G, M, H, C]``, higher goes."""
    return -scorer.layer(layer).keep(features.flatten(0, 1)).unflatten(0, features.shape[:2])


def level(rewards: Tensor) -> bool:
    """Whether rewards ``[G]`` are equal to rounding."""
    return float(rewards.max() - rewards.min()) <= LEVEL * max(1.0, float(rewards.abs().max()))
