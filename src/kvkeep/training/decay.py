"""Three ways to a scorer's decay: learned through the boundary loss, fitted to the attention by age, chosen by loss.

A decay learned through the boundary loss collapses (labels that share it agree with anything), and recall against the
teacher falls while loss improves, so neither can choose it. What is chosen from a grid, a few forwards each, is one
number for all heads, in standard deviations of the score per ``decay_step`` tokens; or, where every head has a decay
that was fitted to its own attention, one factor for all of them; for every budget by itself, since a larger one wants
less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from kvkeep import policies
from kvkeep.runtime.replay import replay
from kvkeep.scorers import Scorer

GRID = (0.0, 0.1, 0.2, 0.3, 0.5)
FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0)  # of fitted decays
GAMMA_RANGE = (0.9, 1 - 1e-4)  # of a decay learned by gradient: outside, the labels agree with anything
START = 0.2  # of a fitted decay, per decay step


class LearnedDecay(torch.nn.Module):
    """``log gamma = logsigmoid(a)`` per layer and head, on the raw log scores (KVpop, section 3)."""

    def __init__(self, scorer: Scorer, gamma: float):
        super().__init__()
        start = math.log(gamma / (1 - gamma))
        shapes = {str(shape.index): shape.kv_heads for shape in scorer.geometry}
        self.a = torch.nn.ParameterDict(
            {layer: torch.nn.Parameter(torch.full((heads,), start)) for layer, heads in shapes.items()}
        )

    def log_gamma(self, layer: int) -> Tensor:
        return logsigmoid(self.a[str(layer)])

    @torch.no_grad()
    def clamp(self) -> None:
        low, high = (math.log(gamma / (1 - gamma)) for gamma in GAMMA_RANGE)
        for a in self.a.values():
            a.clamp_(low, high)


class FittedDecay(torch.nn.Module):
    """What the log intensity loses per decay step of age, one number >= 0 per layer and head."""

    def __init__(self, scorer: Scorer):
        super().__init__()
        shapes = {str(shape.index): shape.kv_heads for shape in scorer.geometry}
        self.rate = torch.nn.ParameterDict(
            {layer: torch.nn.Parameter(torch.full((heads,), START)) for layer, heads in shapes.items()}
        )

    @torch.no_grad()
    def clamp(self) -> None:
        for rate in self.rate.values():
            rate.clamp_(min=0.0)


def calibrate_decay(
    model: PreTrainedModel,
    scorer: Scorer,
    documents: Sequence[tuple[object, Tensor]],
    grid: Sequence[float] = GRID,
    fitted: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[int, dict[float, float]]:
    """Set the scorer's decay to the one of least loss at each of the budgets it is trained for.

    Of decays that lose the same the one that changes least is taken: a factor near 1, a decay near 0.

    Args:
        model: the backbone.
        scorer: fitted, its scores standardised; its decay is replaced.
        documents: of the training set, a few.
        grid: decays to try, in [0, 1] standard deviations per ``scorer.decay_step`` tokens, or factors.
        fitted: the grid holds factors, 0 or more, of the decays that the scorer's heads have.
        progress: called with ("calibrate", done, total).

    Returns:
        Per budget, by the tokens it holds: the loss ratio to the full cache per decay or factor, pooled over documents.

    Raises:
        ValueError: for a decay outside [0, 1], a factor below 0, or no document longer than the largest budget.
    """
    if not grid or min(grid) < 0 or (max(grid) > 1 and not fitted):
        raise ValueError(
            f"{'factors must be 0 or more' if fitted else 'decays to try must lie in [0, 1]'}, not {list(grid)}"
        )
    longest = max(budget.rest for budget in scorer.budgets)
    texts = [ids.reshape(1, -1).to(model.device) for _, ids in documents if ids.numel() > longest + 1]
    if not texts:
        raise ValueError(f"no document to calibrate on is longer than the budget of {longest} tokens")
    if not fitted:
        scorer.set_decay(-1.0)  # the unit of the grid
    total, done = len(texts) * (1 + len(grid) * len(scorer.budgets)), 0
    full = dict.fromkeys(scorer.budgets, 0.0)
    spent = {budget: dict.fromkeys(grid, 0.0) for budget in scorer.budgets}
    for ids in texts:
        whole = replay(model, ids, policies.create("full")).token_loss
        done += 1
        for budget in scorer.budgets:
            full[budget] += float(whole[:, budget.rest :].sum())
            for decay in grid:
                scorer.decay_factors = {budget.rest: decay}
                policy = policies.create(scorer.method, budget, scorer=scorer)
                spent[budget][decay] += float(replay(model, ids, policy).token_loss[:, budget.rest :].sum())
                done += 1
                if progress is not None:
                    progress("calibrate", done, total)
    ratios = {
        budget.rest: {decay: loss / full[budget] for decay, loss in spent[budget].items()} for budget in scorer.budgets
    }
    unchanged = 1.0 if fitted else 0.0
    scorer.decay_factors = {
        rest: min(found, key=lambda decay: (found[decay], abs(decay - unchanged))) for rest, found in ratios.items()
    }
    return ratios
