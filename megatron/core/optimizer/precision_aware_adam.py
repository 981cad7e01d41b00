"""Adam whose moments and gradients may be kept in bf16 (--use-precision-aware-optimizer).

A step widens the moments and the gradient of one parameter at a time to the parameter's dtype, runs torch's fused
kernel on them, and rounds the moments back to nearest even. With fp32 moments and gradients nothing is converted and
the bits are those of torch's Adam.

    second moment in bf16: an update by less than 2^-9 of the old value is lost, as beta2 = 0.999 asks for once the
    moment has settled; prefer beta2 = 0.95 or keep it in fp32.

Gradients come in `param.decoupled_grad`: torch ties the dtype of `param.grad` to the parameter's.
Memory: one parameter's moments and gradient in its own dtype, while it is updated.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam

MOMENTS = ("exp_avg", "exp_avg_sq")


class PrecisionAwareAdam(torch.optim.Optimizer):
    """Adam or AdamW over groups as torch's; state tensors are made by the owner, in the dtypes it wants."""

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, is_weight_decay_decoupled: bool
    ) -> None:
        """Groups bring their own `lr` and `weight_decay`."""
        super().__init__(groups, {"betas": betas, "eps": eps})
        self.is_weight_decay_decoupled = is_weight_decay_decoupled

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; there is no closure."""
        assert closure is None, "the step of a large model is not evaluated twice"
        for group in self.param_groups:
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None)
                if grad is not None:
                    self._update(param, grad, group)

    def _update(self, param: torch.nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """One parameter [n] with its gradient [n]."""
        state = self.state[param]
        wide = {key: state[key].to(param.dtype) for key in MOMENTS}
        beta1, beta2 = group["betas"]
        adam(
            [param],
            [grad.to(param.dtype)],
            [wide["exp_avg"]],
            [wide["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            found_inf=getattr(self, "found_inf", None),
            decoupled_weight_decay=self.is_weight_decay_decoupled,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for key in MOMENTS:
            if wide[key] is not state[key]:
                state[key].copy_(wide[key])
