"""Layer norm and RMS norm over the last dimension.

    LayerNorm  y = (x - mean) / sqrt(var + eps) * w + b
    RMSNorm    y = x / sqrt(mean(x^2) + eps) * w

Statistics are fp32 at least. Equal dtypes go to torch's kernel, which widens inside. Two cases are widened here and
narrowed to the dtype of the weight: an fp32 residual stream under half-precision weights, and a weight stored minus
one, since 1 + w would lose the small digits of w in half precision. On a GPU kernels of ours do the RMS norm, together
with the residual stream where there is one (`fused_rms_norm`).

Legend: h width.
"""

import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_rms_norm import NormRule, add_rms_norm, uses_norm_kernels
from megatron.core.utils.upcast import upcast


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, zero_centered: bool = False
) -> torch.Tensor:
    """Return the layer norm. Shapes: x [..., h], weight [h], bias [h] -> [..., h] in the dtype of the weight."""
    shape = weight.shape
    if x.dtype == weight.dtype and not zero_centered:
        return F.layer_norm(x, shape, weight, bias, eps)
    gamma = upcast(weight) + 1 if zero_centered else upcast(weight)
    return F.layer_norm(upcast(x), shape, gamma, upcast(bias), eps).to(weight.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False) -> torch.Tensor:
    """Return the RMS norm. Shapes: x [..., h], weight [h] -> [..., h] in the dtype of the weight."""
    if uses_norm_kernels(x, weight):
        return add_rms_norm(x, None, weight, NormRule(eps, float(zero_centered)))[0]
    shape = weight.shape
    if x.dtype == weight.dtype and not zero_centered:
        return F.rms_norm(x, shape, weight, eps)
    gamma = upcast(weight) + 1 if zero_centered else upcast(weight)
    return F.rms_norm(upcast(x), shape, gamma, eps).to(weight.dtype)
