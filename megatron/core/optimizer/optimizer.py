"""The optimizer of a whole model: dense and expert parameters, one gradient norm, one clip coefficient, one step.

step():
    1. collect the gradients (the main gradients of the buffers, in fp32 or fp64);
    2. with a loss scale: divide by it and look for infinity and NaN; all ranks skip the step if one rank found any;
    3. norm of the unsharded model's gradient, and the number of its zeros if asked for;
    4. clip;
    5. update the main parameters (torch's fused kernels) and round them into the model's.

`step_on_device` does the same for a step whose effects a guard decides on the device, and reads nothing.

State is kept by the parameter's global name, so that it can be saved and loaded without knowing the order of groups.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer.clip_grads import (
    clip_by_total_norm,
    clip_coefficient,
    count_zeros,
    total_norm,
    unique_tensors,
)
from megatron.core.optimizer.grad_scaler import build_grad_scaler
from megatron.core.optimizer.main_params import HALF_DTYPES, MainParams
from megatron.core.optimizer.neighbours import zeros_beside
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import build_param_groups
from megatron.core.optimizer.precision_aware_adam import MOMENTS, PrecisionAwareAdam
from megatron.core.optimizer.sharded_params import ShardedMainParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_guard import StepGuard
from megatron.core.utils.collectives import MAX, all_reduce

BuildAdam = Callable[[list[dict[str, Any]], tuple[float, float], float, bool], torch.optim.Optimizer]

SAVED_GROUP_KEYS = ("lr", "weight_decay")
"""What a saved group restores. Everything else is configuration, which the new run states itself."""

MAIN_PARAM = "main_param"
"""Key of a main copy among the saved tensors of its parameter."""


MAIN_GRAD = "main_grad"
"""Key of the reduced gradient where whole states are compared."""


class ParamState(NamedTuple):
    """What the optimizer keeps of one parameter on this rank."""

    name: str
    """global name"""
    param: torch.nn.Parameter
    """the model's parameter"""
    tensors: dict[str, torch.Tensor]
    """the live tensors by key: of the parameter's shape, flat [n] if only a range of it is kept, or scalars []"""
    flat_range: tuple[int, int] | None = None
    """first element of the flattened parameter that is kept, and the one behind the last; None: all in its shape"""


class DeviceStep(NamedTuple):
    """What a step leaves on the device."""

    norm: torch.Tensor
    """gradient norm before clipping []"""
    num_zeros: torch.Tensor | None
    """zeros in the gradient [], int64, if they are counted"""


class MegatronOptimizer:
    """Adam or SGD over `named_params`, pairs of (global name, parameter) that are equal on all replicas."""

    def __init__(
        self,
        config: OptimizerConfig,
        named_params: Iterable[tuple[str, torch.nn.Parameter]],
        pg_collection: ProcessGroupCollection,
        build_adam: BuildAdam = PrecisionAwareAdam,
    ) -> None:
        """Build groups, main copies and zero moments; communicates the keys of the groups.

        `build_adam` makes the precision-aware optimizer from groups, betas, eps and whether decay is decoupled.
        """
        named_params = list(named_params)
        if not named_params:
            raise ConfigError("model_chunks: the model has no parameters; there is nothing to optimize.")
        if config.lr is None:
            raise ConfigError("lr=None: an optimizer needs a learning rate; set --lr.")
        self.config = config
        self.pg_collection = pg_collection
        self.device = named_params[0][1].device
        groups = build_param_groups(named_params, config, pg_collection)
        _check_dtypes(config, groups)
        self.norm_groups = pg_collection
        self._main = self._build_main(param for group in groups for param in group["params"])
        main_of = dict(self._main.pairs)
        for group in groups:
            kept = [(name, main_of[p]) for name, p in zip(group["names"], group["params"], strict=True) if p in main_of]
            group["names"], group["params"] = [name for name, _ in kept], [main for _, main in kept]
        self._inner = _build_inner(config, groups, self.device, build_adam)
        self._rates = self._rates_on_device()
        self._fill_state()
        self._scaler = build_grad_scaler(config, self.device)

    def _build_main(self, params: Iterable[torch.nn.Parameter]) -> MainParams | ShardedMainParams:
        return MainParams(params)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of `build_param_groups`; `params` are the main parameters."""
        return self._inner.param_groups

    # Loss scale.

    def get_loss_scale(self) -> torch.Tensor:
        """Current loss scale [1], on the device; one without scaling, on the host, which need not wait to read it."""
        return torch.ones(1) if self._scaler is None else self._scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply `loss` [...] by the loss scale."""
        return loss if self._scaler is None else loss * self._scaler.scale.reshape(())

    # The step.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients outside the buffers; the buffers are cleared by their owner."""
        self._main.release_grads()
        for param, _ in self._main.pairs:
            if not set_to_none and param.grad is not None:
                param.grad.zero_()
            else:
                param.grad = None

    def step(self) -> tuple[bool, float | None, int | None]:
        """Update the model and return (updated, gradient norm before clipping, zeros in the gradient if counted).

        A skipped step returns (False, None, None). Host: reads the norm, and before it the overflow flag if the loss is
        scaled.
        """
        # Step 1
        grads = self._main.collect_grads()
        # Step 2
        if self._scaler is not None:
            found_inf = self._unscale(grads)
            all_reduce(found_inf, self.pg_collection.world, MAX)
            is_skipped = bool(found_inf.item() > 0)
            self._scaler.update(is_skipped)
            if is_skipped:
                self._main.release_grads()
                return False, None, None
        # Step 3
        norm, num_zeros = self._measure()
        # Step 4
        if self.config.clip_grad > 0.0:
            self._clip(grads, norm)
        # Step 5
        self.write_learning_rates()
        self._update(None)
        return True, float(norm), None if num_zeros is None else int(num_zeros)

    @torch.no_grad()
    def step_on_device(self, guard: StepGuard, refuses_non_finite: bool) -> DeviceStep:
        """As `step`, without a host read: `guard` is settled among all ranks and decides whether anything changes.

        A norm that is inf or nan raises the guard with `refuses_non_finite`, an overflow under a loss scale always.
        Graph: capturable. Learning rates are read from the device, see `write_learning_rates`.
        """
        # Step 1
        grads = self._main.collect_grads()
        # Step 2
        if self._scaler is not None:
            guard.report_non_finite(self._unscale(grads))
        # Step 3
        norm, num_zeros = self._measure()
        if refuses_non_finite:
            guard.report_values(norm)
        guard.agree(self.pg_collection.world)
        raised = guard.raised()
        # Step 4
        if self.config.clip_grad > 0.0:
            self._clip(grads, torch.where(raised > 0, torch.zeros_like(norm), norm))  # a norm of zero clips nothing
        # Step 5
        self._update(raised)
        return DeviceStep(norm, num_zeros)

    def settle(self, is_skipped: bool) -> None:
        """Tell the loss scale how a step on the device ended."""
        if self._scaler is not None:
            self._scaler.update(is_skipped)

    def _unscale(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Divide by the loss scale; fp32 [1], above 0 if this rank has a gradient that is not finite."""
        assert self._scaler is not None, "unscaling needs a loss scale"
        found_inf = torch.zeros(1, dtype=torch.float32, device=self.device)
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, self._scaler.inv_scale)
        return found_inf

    def _measure(self) -> DeviceStep:
        """Norm and zeros of the collected gradients, over all ranks."""
        unique = unique_tensors(self._main.grads_by_param(), self.norm_groups)
        norm = total_norm(unique, self.norm_groups, self.device)
        is_counted = self.config.log_num_zeros_in_grad
        return DeviceStep(norm, count_zeros(unique, self.norm_groups, self.device) if is_counted else None)

    @property
    def _clips_in_update(self) -> bool:
        """True if a fused Adam clips as it updates, which saves a pass over all gradients."""
        is_fused = type(self._inner) in (torch.optim.Adam, torch.optim.AdamW, PrecisionAwareAdam)
        return is_fused and bool(self._rates)

    def _clip(self, grads: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Step 4, or hand it to step 5: gradients [...] with their norm []."""
        if self._clips_in_update:
            # the kernel divides gradients by this number
            self._inner.grad_scale = 1.0 / clip_coefficient(self.config.clip_grad, norm)  # type: ignore[attr-defined]
        else:
            clip_by_total_norm(grads, self.config.clip_grad, norm)

    def _rates_on_device(self) -> list[torch.Tensor]:
        """A learning rate [] for each group; none where the kernels take numbers: on a CPU, and in fp64."""
        params = [group["params"] for group in self.param_groups]
        if self.device.type != "cuda" or any(param.dtype != torch.float32 for group in params for param in group):
            return []
        return [torch.zeros((), dtype=torch.float32, device=self.device) for _ in params]

    def write_learning_rates(self) -> None:
        """Bring the groups' learning rates to where the kernels read them. Host: no synchronisation."""
        for rate, group in zip(self._rates, self.param_groups, strict=False):
            rate.fill_(group["lr"])

    def _update(self, found_inf: torch.Tensor | None) -> None:
        """Step 5; with `found_inf` [] of 1.0 the kernels leave weights, moments and step counts alone."""
        numbers = [group["lr"] for group in self.param_groups]
        self._inner.found_inf = found_inf  # type: ignore[attr-defined]
        for rate, group in zip(self._rates, self.param_groups, strict=False):
            group["lr"] = rate
        try:
            self._inner.step()
        finally:
            self._inner.grad_scale = None  # type: ignore[attr-defined]
            for number, group in zip(numbers, self.param_groups, strict=True):
                group["lr"] = number
        self._main.release_grads()
        self._main.write_back(is_rounded=isinstance(self._inner, PrecisionAwareAdam))

    def reload_model_params(self) -> None:
        """Renew the main copies after the model's weights were loaded without optimizer state."""
        self._main.reload()

    # State.

    def _fill_state(self) -> None:
        """Allocate what the algorithm would allocate in its first step, so that loading always finds it."""
        params = [param for group in self.param_groups for param in group["params"]]
        if self.config.optimizer == "sgd":
            self._inner.state.update({param: {"momentum_buffer": torch.zeros_like(param)} for param in params})
            return
        means, squares = (zeros_beside(params, partial(self.config.moment_dtype, key)) for key in MOMENTS)
        for param, mean, square in zip(params, means, squares, strict=True):
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            self._inner.state[param] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}

    def named_state(self) -> Iterator[ParamState]:
        """Yield what this rank keeps, in group order.

        Adam: `step` [], `exp_avg`, `exp_avg_sq`; SGD: `momentum_buffer`; with half-precision parameters also
        `main_param`. All but `step` have the parameter's shape.
        """
        names = (name for group in self.param_groups for name in group["names"])
        for name, (param, main) in zip(names, self._main.pairs, strict=True):
            tensors = {key: value for key, value in self._inner.state[main].items() if value is not None}
            if param.dtype in HALF_DTYPES:
                tensors[MAIN_PARAM] = main.detach()
            yield ParamState(name, param, tensors)

    def whole_state(self) -> Iterator[ParamState]:
        """Yield the state of every parameter in the parameter's shape, with its reduced gradient as `main_grad`."""
        for state in self.named_state():
            main_grad = getattr(state.param, "main_grad", None)
            if main_grad is not None:
                state.tensors[MAIN_GRAD] = main_grad
            yield state

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on: `state` by name, `param_groups`, `grad_scaler`."""
        groups = [
            {"names": list(group["names"]), **{key: group[key] for key in SAVED_GROUP_KEYS}}
            for group in self.param_groups
        ]
        return {
            "state": {state.name: state.tensors for state in self.named_state()},
            "param_groups": groups,
            "grad_scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`; raises CheckpointError if parameters or their state differ."""
        saved = state_dict["state"]
        live = {state.name: state.tensors for state in self.named_state()}
        _check_same_keys("optimizer state", live, saved)
        for name, tensors in live.items():
            _check_same_keys(f"optimizer state of {name!r}", tensors, saved[name])
            for key, tensor in tensors.items():
                _copy_saved(f"{name}.{key}", tensor, saved[name][key])
        values_of = {name: group for group in state_dict["param_groups"] for name in group["names"]}
        for group in self.param_groups:
            for name in group["names"][:1]:
                group.update({key: values_of[name][key] for key in SAVED_GROUP_KEYS})
        if self._scaler is not None and state_dict["grad_scaler"]:
            self._scaler.load_state_dict(state_dict["grad_scaler"])
        self._main.write_back()


def _build_inner(
    config: OptimizerConfig, groups: list[dict[str, Any]], device: torch.device, build_adam: BuildAdam
) -> torch.optim.Optimizer:
    """Build torch's fused Adam, AdamW or SGD, or the Adam with moments of other dtypes."""
    betas = (config.adam_beta1, config.adam_beta2)
    if config.use_precision_aware_optimizer:
        return build_adam(groups, betas, config.adam_eps, config.decoupled_weight_decay)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.sgd_momentum, fused=True)
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    # "capturable" changes nothing in the fused kernels, it only lets a capture pass; torch warns if there is none
    inner = kind(groups, betas=betas, eps=config.adam_eps, fused=True, capturable=device.type == "cuda")
    inner._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return inner


def _check_dtypes(config: OptimizerConfig, groups: list[dict[str, Any]]) -> None:
    """Refuse fp16 parameters without fp16: they need a loss scale that nobody would set."""
    for group in groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            for dtype, field in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
                if param.dtype == dtype and not getattr(config, field):
                    raise ConfigError(
                        f"{field}=False with parameter {name!r} in {dtype}: the optimizer must know the precision of "
                        f"the model; set OptimizerConfig({field}=True)."
                    )


def _check_same_keys(what: str, live: dict[str, Any], saved: dict[str, Any]) -> None:
    missing, extra = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
    if missing or extra:
        raise CheckpointError(
            f"{what}: missing {missing or 'nothing'}, not expected {extra or 'nothing'}; load a checkpoint of the same "
            "model, optimizer and precision, or leave its optimizer out with --no-load-optim."
        )


def _copy_saved(name: str, live: torch.Tensor, saved: torch.Tensor) -> None:
    if live.shape != saved.shape or live.dtype != saved.dtype:
        raise CheckpointError(
            f"{name!r} is {saved.dtype} {list(saved.shape)} in the saved optimizer state, the model has {live.dtype} "
            f"{list(live.shape)}; load a checkpoint of the same model and precision, or use --no-load-optim."
        )
    live.copy_(saved)
