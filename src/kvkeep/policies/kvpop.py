"""KVpop: a matrix memory that has seen the whole window judges the token that leaves it."""

from __future__ import annotations

from kvkeep.policies.learned import LearnedEntry
from kvkeep.scorers.mlstm import features_for


class KVpop(LearnedEntry):
    """KVpop with the delayed mLSTM scorer: ``pi_t = r(k_t, v_t, C_{t+w}) - floor(t / step) * log_gamma``.

    Paper: KVpop, arXiv 2607.05061, section 3.2; the network is :class:`kvkeep.scorers.mlstm.MLSTM`. At query
    q the entering pair is written to the memory C, then C is read with token q - w; what C costs is charged against
    top-k. Deviations: the static priority (see :class:`~kvkeep.policies.kvpop_mlp.KVpopMLP`) and a memory sized to at
    most 8 % of the slots, where the released model spends 64 of 4,096 entries.
    """

    name = "kvpop"
    paper = "arXiv 2607.05061"

    @classmethod
    def default_state(cls, slots: int) -> int:
        return features_for(slots) + 1  # in heads of at least as many dimensions
