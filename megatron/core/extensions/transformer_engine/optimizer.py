"""Adam of Transformer Engine in place of `PrecisionAwareAdam`: one kernel for many tensors, moments in fp32 or bf16.

State stays where the optimizer keeps it (`step`, `exp_avg`, `exp_avg_sq` of each parameter), so that checkpoints are
the same. The library counts steps by group, on the device; the count is taken from the parameters' and written back. A
raised guard reaches its kernels as an overflow that a gradient scaler found: nothing changes then, the count included.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.errors import ConfigError
from megatron.core.extensions.transformer_engine.probe import load_library

_NEEDED_BY = "use_precision_aware_optimizer=True with transformer_impl='transformer_engine'"


class EngineAdam(torch.optim.Optimizer):
    """Adam or AdamW over groups of fp32 parameters as torch's; state tensors are made by the owner.

    Args:
        groups: With their own `lr` and `weight_decay`; a rate may be a tensor [] on the device.
        moment_dtypes: Of `exp_avg` and `exp_avg_sq`: both fp32 or both bf16.

    Raises: ConfigError for other dtypes, or if the library is too old.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        is_weight_decay_decoupled: bool,
        moment_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        library = load_library(_NEEDED_BY)
        library.need("fused_adam", _NEEDED_BY)
        if moment_dtypes[0] is not moment_dtypes[1]:
            raise ConfigError(
                f"exp_avg_dtype, exp_avg_sq_dtype of {moment_dtypes} with transformer_impl='transformer_engine': its "
                "kernels take equal ones; set both to fp32 or bf16, or use --transformer-impl local."
            )
        self.found_inf: torch.Tensor | None = None
        engine_groups = [{"params": list(group["params"])} for group in self.param_groups]
        self._engine = library.root.pytorch.optimizers.FusedAdam(
            engine_groups,
            betas=betas,
            eps=eps,
            adam_w_mode=is_weight_decay_decoupled,
            capturable=True,
            exp_avg_dtype=moment_dtypes[0],
            exp_avg_sq_dtype=moment_dtypes[1],
            use_decoupled_grad=True,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; there is no closure. Host: no synchronisation."""
        assert closure is None, "the step of a large model is not evaluated twice"
        engine = self._engine
        engine.state = self.state
        for group, engine_group in zip(self.param_groups, engine.param_groups, strict=True):
            device = next((param.device for param in group["params"]), None)
            engine_group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            engine_group["weight_decay"] = group["weight_decay"]
            for param in group["params"]:
                _check_gradient(param)
                engine_group["step"] = self.state[param]["step"].to(torch.int).reshape(1)
                engine._scales[param] = dict.fromkeys(("exp_avg", "exp_avg_sq"), None)  # bf16 has no scale
        overflow = None if self.found_inf is None else _Overflow(self.found_inf)
        # the library counts the step before it asks for the overflow, by what its buffer has from the step before
        engine._dummy_overflow_buf.fill_(0) if overflow is None else engine._dummy_overflow_buf.copy_(
            overflow.found_inf
        )
        engine.step(grad_scaler=overflow)
        for group, engine_group in zip(self.param_groups, engine.param_groups, strict=True):
            for param in group["params"]:
                self.state[param]["step"].copy_(engine_group["step"].reshape(()))


class _Overflow:
    """What the library asks of a gradient scaler: whether to skip, and a scale of one."""

    def __init__(self, found_inf: torch.Tensor) -> None:
        self.found_inf = found_inf.reshape(1)
        """fp32 [1], 1.0 to skip."""

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
        del optimizer
        return {self.found_inf.device: self.found_inf}

    def _get_scale_async(self) -> torch.Tensor:
        return torch.ones_like(self.found_inf, dtype=torch.float32)


def _check_gradient(param: torch.nn.Parameter) -> None:
    """Refuse a gradient of `param` [n] that the kernels would read in the wrong dtype."""
    grad = getattr(param, "decoupled_grad", None)
    if grad is not None and grad.dtype != param.dtype:
        raise ConfigError(
            f"main_grads_dtype of {grad.dtype} with transformer_impl='transformer_engine': its Adam takes gradients in "
            f"{param.dtype}; use --main-grads-dtype fp32, or --transformer-impl local."
        )
