"""How a scorer learns what to keep: losses, and the loops that use them."""
