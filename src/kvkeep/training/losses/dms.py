"""DMS (arXiv 2506.05345) as its public code trains it: a gate per token and KV head, soft while it learns.

A token is decided on when it enters and goes when it leaves the window. The gate of key j is read one token later, from
the logit of token j + 1. In training a closed gate is an additive attention bias, which carries the gradient; a hinge
asks for a share of closed gates, and the distillation loss says which ones can be spared.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad


def dms_relax(logits: Tensor, temperature: float = 0.1, generator: torch.Generator | None = None) -> Tensor:
    """Logits of a relaxed Bernoulli gate: `(logits + logistic noise) / temperature`, any shape.

    `sigmoid` of the result is the soft gate, `> 0` the hard one. The noise is drawn in float64 on the generator's
    device.

    Raises:
        ValueError: where the temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    device = logits.device if generator is None else generator.device
    uniform = torch.rand(logits.shape, dtype=torch.float64, device=device, generator=generator)
    noise = uniform.clamp(2.0**-54, 1 - 2.0**-53).logit()
    return (logits + noise.to(logits.device, logits.dtype)) / temperature


def dms_key_bias(logits: Tensor) -> Tensor:
    """`logsigmoid(-logits[j + 1])` for each key j, `[..., S]` -> `[..., S]`; the last key takes the logit 0.

    Example:
        >>> dms_key_bias(torch.tensor([0.0, 1.0, -2.0, 0.5]))
        tensor([-1.3133, -0.1269, -0.9741, -0.6931])
    """
    return logsigmoid(-pad(logits[..., 1:], (0, 1)))


def dms_bias(logits: Tensor, window: int, queries: slice | None = None) -> Tensor:
    """The additive attention bias of soft gates: `dms_key_bias` on key j for queries q > j + window, else 0.

    Args:
        logits: `[..., S]`, above 0 to close.
        window: keys at most this far back are untouched.
        queries: which rows; None for all. Give row blocks of a long sequence: the whole is S x S.

    Returns:
        `[..., Q, S]`, 0 for keys after the query: the causal mask is the attention's business.

    Raises:
        ValueError: where the window is below 0.

    Example:
        >>> dms_bias(torch.tensor([0.0, 1.0, -2.0, 0.5]), window=1)[3]
        tensor([-1.3133, -0.1269,  0.0000,  0.0000])
    """
    if window < 0:
        raise ValueError(f"window must be at least 0, got {window}")
    position = torch.arange(logits.shape[-1], device=logits.device)
    far = position[queries or slice(None), None] - position > window  # [Q, S]
    return torch.where(far, dms_key_bias(logits)[..., None, :], 0.0)


def dms_closed(logits: Tensor) -> Tensor:
    """The share of closed gates, a scalar: counted hard (`> 0`), with the gradient of the soft share."""
    soft = logits.sigmoid()
    hard = (logits > 0).to(soft.dtype)
    return (hard + soft - soft.detach()).mean()


def dms_hinge(closed_fraction: Tensor, target: float | Tensor) -> Tensor:
    """Mean of `max(target - closed_fraction, 0)` over layers: closing more than asked for costs nothing.

    Args:
        closed_fraction: any shape, in [0, 1].
        target: the share that shall be closed, `1 - 1 / CR` for a compression of CR.

    Example:
        >>> dms_hinge(torch.tensor(0.6), 1 - 1 / 4)
        tensor(0.1500)
    """
    return (target - closed_fraction).clamp(min=0).mean()
