"""Three ways to a scorer's decay: learned through the boundary loss, fitted to the attention by age, chosen by loss.

A decay learned through the boundary loss collapses (labels that share it agree with anything), and recall against the
teacher falls while loss improves, so neither can choose it. What is chosen from a grid, a few forwards each, is one
number for all heads, in standard deviations of the score per ``decay_step`` tokens; or, where every head has a decay
that was fitted to its own attention, one factor for all of them.
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
) -> dict[float, float]:
    """Set the scorer's decay to the one of least loss, averaged over the budgets it is trained for.

    Args:
        model: the backbone.
        scorer: fitted, its scores standardised; its decay is replaced.
        documents: of the training set, a few.
        grid: decays to try, in [0, 1] standard deviations per ``scorer.decay_step`` tokens, or factors.
        fitted: the grid holds factors, 0 or more, of the decays that the scorer's heads have.
        progress: called with ("calibrate", done, total).

    Returns:
        Loss ratio to the full cache per decay or factor, pooled over documents, mean over budgets.

    Raises:
        ValueError: for a decay outside [0, 1], a factor below 0, or no document longer than the largest budget.
    """
    if not grid or min(grid) < 0 or (max(grid) > 1 and not fitted):
        raise ValueError(
            f"{'factors must be 0 or more' if fitted else 'decays to try must lie in [0, 1]'}, not {list(grid)}"
        )
    units = {}  # of the grid: log_gamma [H] per layer
    for shape in scorer.geometry:
        log_gamma = scorer.layer(shape.index).log_gamma
        units[shape.index] = log_gamma.clone() if fitted else -torch.ones_like(log_gamma)

    def scaled(decay: float) -> dict[int, Tensor]:
        return {index: decay * unit for index, unit in units.items()}

    longest = max(budget.rest for budget in scorer.budgets)
    texts = [ids.reshape(1, -1).to(model.device) for _, ids in documents if ids.numel() > longest + 1]
    if not texts:
        raise ValueError(f"no document to calibrate on is longer than the budget of {longest} tokens")
    total, done = len(texts) * (1 + len(grid) * len(scorer.budgets)), 0
    full, spent = [], {(decay, budget): 0.0 for decay in grid for budget in scorer.budgets}
    for ids in texts:
        full.append(replay(model, ids, policies.create("full")).token_loss)
        for decay in grid:
            scorer.set_decay(scaled(decay))
            for budget in scorer.budgets:
                policy = policies.create(scorer.method, budget, scorer=scorer)
                spent[decay, budget] += float(replay(model, ids, policy).token_loss[:, budget.rest :].sum())
                done += 1
                if progress is not None:
                    progress("calibrate", done + len(full), total)
    ratios = {}
    for decay in grid:
        each = [spent[decay, b] / float(sum(loss[:, b.rest :].sum() for loss in full)) for b in scorer.budgets]
        ratios[decay] = sum(each) / len(each)
    best = min(ratios, key=ratios.get)
    scorer.set_decay(scaled(best))
    return ratios
