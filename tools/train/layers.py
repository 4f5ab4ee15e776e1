"""What the networks for training have in common."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depthwise causal convolution; x (batch, length, channels), weight (channels, 1, kernel).

    A sum over shifted copies: the library's depthwise kernels are slow backwards.
    """
    kernel = weight.shape[-1]
    taps = weight.squeeze(1).to(x.dtype)
    padded = F.pad(x, (0, 0, kernel - 1, 0))
    out = x.new_zeros(()) if bias is None else bias.to(x.dtype)
    for k in range(kernel):
        out = torch.addcmul(out, padded[:, k : k + x.shape[1]], taps[:, k])
    return out


def inverse_softplus(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))
