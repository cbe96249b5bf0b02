"""KVpop without memory: a small network on the cached pair foresees how much attention a token will get."""

from __future__ import annotations

from kvkeep.policies.learned import LearnedEntry


class KVpopMLP(LearnedEntry):
    """KVpop with the MLP scorer: ``pi_t = r(k_t, v_t) - floor(t / step) * log_gamma`` when t leaves the window.

    Paper: KVpop, arXiv 2607.05061, section 3.2; the network is :class:`kvkeep.scorers.mlp.MLP`. Deviation:
    the paper ranks by a score that decays at every query, which lets tokens come back; ours is the static priority
    that decays in blocks of ``step`` (see :func:`kvkeep.lifetimes.static_priority`).
    """

    name = "kvpop_mlp"
    judges_alone = True
    paper = "arXiv 2607.05061"
