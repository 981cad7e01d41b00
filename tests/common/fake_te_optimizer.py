"""FusedAdam of the stand-in for Transformer Engine, as far as a captured step uses it: torch's Adam on each tensor."""

from typing import Any

import torch
from torch.optim.adam import adam

from tests.common.fake_te_signatures import bound, signature_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Rates and counts are tensors, gradients have the dtype of their parameters."""

    __signature__ = signature_of("pytorch.optimizers.FusedAdam")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = bound(self.__signature__, args, kwargs)
        assert self.args.capturable, "the stand-in knows captured steps only"
        assert self.args.use_decoupled_grad, "and gradients beside the parameter"
        super().__init__(self.args.params, {"lr": torch.tensor(self.args.lr), "weight_decay": self.args.weight_decay})
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)
        self._scales: dict[Any, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            # counted by the overflow of the step before, as in the library
            group.setdefault("step", torch.zeros(1, dtype=torch.int))
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
            if not group["params"]:
                continue
            found_inf = torch.zeros(1)
            if grad_scaler is not None:
                found_inf = grad_scaler._check_inf_per_device(self)[group["params"][0].device]
                assert grad_scaler._get_scale_async().tolist() == [1.0]
            self._dummy_overflow_buf.copy_(found_inf)
            for param in group["params"]:
                self._update(param, group, found_inf)

    def _update(self, param: torch.nn.Parameter, group: dict[str, Any], found_inf: torch.Tensor) -> None:
        grad, state = param.decoupled_grad, self.state[param]
        if grad is None or found_inf.item() == 1:
            return
        assert grad.dtype == param.dtype == torch.float32
        wide = [state[name].float() for name in MOMENTS]
        expected = (self.args.exp_avg_dtype, self.args.exp_avg_sq_dtype)
        assert tuple(state[name].dtype for name in MOMENTS) == expected
        adam(
            [param],
            [grad],
            [wide[0]],
            [wide[1]],
            [],
            [group["step"].float().reshape(()) - 1],  # torch counts the step itself
            decoupled_weight_decay=bool(self.args.adam_w_mode),
            amsgrad=False,
            beta1=self.args.betas[0],
            beta2=self.args.betas[1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=self.args.eps,
            maximize=False,
        )
        for name, value in zip(MOMENTS, wide, strict=True):
            state[name].copy_(value)
