"""How a scorer learns what to keep: losses, and the loops that use them."""

from kvkeep.training import losses

__all__ = ["losses"]
