"""Adam whose moments and gradients may be kept in bf16 (--use-precision-aware-optimizer).

On a GPU a kernel reads gradient, weight and moments once and also writes the model's half-precision weight, for all
parameters at a time whose memory lies end to end. Elsewhere a step widens moments and gradient of one parameter to its
dtype, runs torch's fused kernel on them, and rounds the moments back to nearest even: with fp32 moments and gradients
the bits are then those of torch's Adam, which the kernel equals within the rounding of fp32.

    second moment in bf16: an update by less than 2^-9 of the old value is lost, as beta2 = 0.999 asks for once the
    moment has settled; prefer beta2 = 0.95 or keep it in fp32.

Gradients come in `param.decoupled_grad`: torch ties the dtype of `param.grad` to the parameter's. `param.rounded` is
the model's weight, if that is a rounding of this one. `found_inf` and `grad_scale` are those of torch's fused Adam.
Memory: without the kernel, one parameter's moments and gradient in its own dtype, while it is updated.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim.adam import adam

from megatron.core.fusions.fused_adam import AdamRule, AdamTensors, StepScalars, adam_step, has_adam_kernel
from megatron.core.optimizer.neighbours import join_neighbours

MOMENTS: tuple[Literal["exp_avg"], Literal["exp_avg_sq"]] = ("exp_avg", "exp_avg_sq")


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
        counts = []
        for group in self.param_groups:
            kernel_parts = []
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None)
                if grad is None:
                    continue
                tensors = AdamTensors(param, grad, **self.state[param], rounded=getattr(param, "rounded", None))
                if has_adam_kernel(tensors):
                    kernel_parts.append(tensors)
                else:
                    self._update(tensors, group)
            for tensors in join_neighbours(kernel_parts):
                self._update_by_kernel(tensors, group)
            counts += [tensors.step for tensors in kernel_parts]
        if counts:
            found_inf = getattr(self, "found_inf", None)
            # a list, because a single tensor would be read by the host
            torch._foreach_add_(counts, 1.0 if found_inf is None else [1.0 - found_inf.reshape(())] * len(counts))

    def _update_by_kernel(self, tensors: AdamTensors, group: dict[str, Any]) -> None:
        """Parameters that lie end to end [n], all but the count of their steps, which all programs read."""
        lr = group["lr"] if isinstance(group["lr"], torch.Tensor) else torch.full((), group["lr"], device="cuda")
        scalars = StepScalars(lr, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        rule = AdamRule(group["betas"], group["eps"], group["weight_decay"], self.is_weight_decay_decoupled)
        adam_step(tensors, scalars, rule)

    def _update(self, tensors: AdamTensors, group: dict[str, Any]) -> None:
        """One parameter [n] with its gradient [n]."""
        param, state = tensors.param, self.state[tensors.param]
        wide = {key: state[key].to(param.dtype) for key in MOMENTS}
        beta1, beta2 = group["betas"]
        adam(
            [param],
            [tensors.grad.to(param.dtype)],
            [wide["exp_avg"]],
            [wide["exp_avg_sq"]],
            [],
            [tensors.step],
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
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
        if tensors.rounded is not None:
            tensors.rounded.copy_(param)
