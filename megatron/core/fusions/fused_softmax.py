"""Softmax of attention scores with scale and mask."""

import torch

from megatron.core.utils.upcast import upcast


def scale_mask_softmax(scores: torch.Tensor, mask: torch.Tensor | None, scale: float, in_fp32: bool) -> torch.Tensor:
    """Return softmax(scale * scores) with masked places left out.

    Shapes: scores [b, n, q, k], mask bool broadcastable to it, True = masked -> [b, n, q, k].
    Dtype:  that of the scores; computed in fp32 at least with `in_fp32`.
    """
    x = upcast(scores) if in_fp32 else scores
    if scale != 1.0:
        x = x * scale
    if mask is not None:
        # The lowest finite number, not -inf: a row that is masked everywhere yields equal weights instead of NaN.
        x = x.masked_fill(mask, torch.finfo(x.dtype).min)
    return torch.softmax(x, dim=-1).to(scores.dtype)
