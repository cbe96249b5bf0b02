"""A step of KVpop's memory for many requests at once, compiled for the CPU.

The same numbers as :class:`kvkeep.scorers.mlstm.MLSTM` for one token a request, which in tensor operations costs a
layer some eighty small calls: here it is one loop over requests and heads, on the memories where their pages keep them.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from kvkeep.policies.base import EntryPolicy, Geometry
from kvkeep.policies.kvpop import KVpop
from kvkeep.scorers.mlstm import LEAST
from kvkeep.serving.memory import PREFIX
from kvkeep.serving.pages import Pages
from kvkeep.serving.rows import Rows


class Recurrence:
    """The step of one layer, bound to its pages.

    Args:
        policy: a :class:`~kvkeep.policies.kvpop.KVpop` that :meth:`takes`.
        geometry: the layer.
        pages: with ``coming`` and the memory among their state.
    """

    @staticmethod
    def takes(policy: EntryPolicy, geometry: Geometry, pages: Pages) -> bool:
        """Whether a layer is on the CPU and scored by the delayed memory of whole values."""
        if not isinstance(policy, KVpop) or pages.flat.device.type != "cpu":
            return False
        options = policy.scorer.layer(geometry.layer).options
        return options.delay and options.value_dim is None

    def __init__(self, policy: KVpop, geometry: Geometry, pages: Pages):
        scorer, layer = policy.scorer, policy.scorer.layer(geometry.layer)
        self.wide, self.window = pages.state["coming"].dtype, policy.budget.window
        self.tables = [pages.state[name].numpy() for name in ("coming", PREFIX + "memory", PREFIX + "stabiliser")]
        entering = torch.cat([layer.w_key, layer.w_gates], -1)  # [H, 2D, F + 2]
        offset = torch.cat([torch.zeros_like(layer.w_key[:, 0]), layer.b_gates], -1)  # [H, F + 2]
        decay = layer.log_gamma * scorer.decay_factor(policy.budget.rest)
        weights = (
            *(layer.input_mean, layer.input_std, entering, offset, layer.w_query, layer.w1, layer.b1),
            *(layer.w2[..., 0], layer.b2[:, 0], layer.score_mean, layer.score_std, decay),
        )
        self.weights = tuple(weight.detach().to(self.wide).contiguous().numpy() for weight in weights)
        self.options = (layer.options.normaliser == "ratio", scorer.decay_step, self.window)

    def score(self, rows: Rows, keys: Tensor, values: Tensor, leaving: tuple[Tensor, Tensor]) -> None:
        """Write the entering pairs to the memories and note the priorities of the leaving ones.

        Args:
            rows: the requests, scored one token ahead.
            keys, values: ``[R, H, D]`` of the tokens that enter.
            leaving: keys and values ``[R, H, 1, D]``.
        """
        enters = torch.cat([keys, values], -1).to(self.wide).numpy()
        leaves = torch.cat(leaving, -1)[:, :, 0].to(self.wide).numpy()
        _compiled()(enters, leaves, *self.tables, *rows.arrays, self.weights, self.options)


@functools.cache
def _compiled():
    import numba  # here, because importing it costs more than everything else in this file

    return numba.njit(nogil=True, cache=True)(_step)


def _step(enters, leaves, coming, memory, stabiliser, blocks, positions, weights, options):
    """MLSTM.recall, then MLSTM.readout, then the static priority; see there for the symbols."""
    mean, std, w_enter, b_enter, w_query, w1, b1, w2, b2, score_mean, score_std, decay = weights
    ratio, decay_step, window = options
    features, size, width = memory.shape[2], memory.shape[3] - 1, w1.shape[2]
    x, read = np.empty_like(mean[0]), np.empty_like(memory[0, 0, 0])
    gates, key = np.empty_like(b_enter[0]), np.empty_like(b_enter[0])
    query, hidden = np.empty_like(b_enter[0]), np.empty_like(b1[0])
    for row in range(len(blocks)):
        block, position = blocks[row], positions[row]
        for head in range(memory.shape[1]):
            held = memory[block, head]
            if position == 0:
                held[:] = 0
                stabiliser[block, head] = -np.inf
            for i in range(len(x)):
                x[i] = (enters[row, head, i] - mean[head, i]) / std[head, i]
            gates[:] = b_enter[head]
            for i in range(len(x)):
                for o in range(features + 2):
                    gates[o] += x[i] * w_enter[head, i, o]
            most, total = gates[:features].max(), gates[0] * 0
            for f in range(features):
                key[f] = np.exp(gates[f] - most)
                total += key[f]
            gate, forget = gates[features], gates[features + 1]
            kept = min(forget, 0) - np.log1p(np.exp(-abs(forget))) + stabiliser[block, head]
            scale = max(kept, gate)
            fade, write = np.exp(kept - scale), np.exp(gate - scale)
            for f in range(features):
                share = key[f] / total * write
                for d in range(size):
                    held[f, d] = fade * held[f, d] + share * x[size + d]
                held[f, size] = fade * held[f, size] + share
            stabiliser[block, head] = scale

            for i in range(len(x)):
                x[i] = (leaves[row, head, i] - mean[head, i]) / std[head, i]
            query[:] = 0
            for i in range(len(x)):
                for f in range(features):
                    query[f] += x[i] * w_query[head, i, f]
            most, total = query[:features].max(), query[0] * 0
            for f in range(features):
                query[f] = np.exp(query[f] - most)
                total += query[f]
            read[:] = 0
            for f in range(features):
                for d in range(size + 1):
                    read[d] += query[f] / total * held[f, d]
            below = max(read[size], LEAST) if ratio else max(abs(read[size]), np.exp(-scale))
            hidden[:] = b1[head]
            for d in range(size):
                recalled = read[d] / below
                for o in range(width):
                    hidden[o] += recalled * w1[head, d, o]
            for i in range(len(x)):
                for o in range(width):
                    hidden[o] += x[i] * w1[head, size + i, o]
            raw = b2[head]
            for o in range(width):
                raw += hidden[o] / (1 + np.exp(-hidden[o])) * w2[head, o]
            score = (raw - score_mean[head]) / score_std[head]
            coming[block, head, position % window] = score - (position - window) // decay_step * decay[head]
