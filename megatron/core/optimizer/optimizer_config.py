"""Settings of the optimizer: algorithm, rates, clipping and loss scaling."""

import dataclasses
from typing import Literal

import torch

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import NO_FLAG, knob


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig(ConfigTopic):
    """What `get_megatron_optimizer` builds; the course of rate and decay over time is `OptimizerParamScheduler`'s."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Algorithm; adam decouples weight decay from the gradient (AdamW) unless decoupled_weight_decay is off."""

    lr: float | None = None
    """Peak learning rate."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    decoupled_lr: float | None = None
    """Peak learning rate of the embedding and the output matrix; unset: the common one."""

    decoupled_min_lr: float | None = None
    """Final learning rate of the embedding and the output matrix; unset: the common one."""

    weight_decay: float = 0.01
    """Weight decay of matrices; biases and one-dimensional parameters have none."""

    apply_wd_to_qk_layernorm: bool = False
    """Decay the weights of the query and key norms too."""

    adam_beta1: float = 0.9
    """Adam: decay of the mean of gradients."""

    adam_beta2: float = 0.999
    """Adam: decay of the mean of squared gradients."""

    adam_eps: float = 1e-8
    """Adam: added to the root of the second moment."""

    decoupled_weight_decay: bool = knob(True, flag=NO_FLAG)
    """Adam: shrink the weights directly (AdamW) instead of adding the decay to the gradient."""

    sgd_momentum: float = 0.9
    """SGD: momentum."""

    clip_grad: float = 1.0
    """Largest L2 norm of all gradients together; longer ones are scaled down to it, 0 switches clipping off."""

    use_distributed_optimizer: bool = knob(False, flag=NO_FLAG)
    """Shard main weights and moments over data parallel ranks; the gradient buffers must be sharded too."""

    use_precision_aware_optimizer: bool = False
    """Keep moments and main gradients in the dtypes given below; with --use-distributed-optimizer and adam."""

    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision-aware optimizer: dtype in which gradients are accumulated, reduced and handed to the update."""

    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision-aware optimizer: dtype of the mean of gradients."""

    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision-aware optimizer: dtype of the mean of squared gradients."""

    log_num_zeros_in_grad: bool = False
    """Count the zero elements of the gradients in each step."""

    bf16: bool = knob(False, flag=NO_FLAG)
    """The model computes in bfloat16; its bf16 parameters get fp32 main copies."""

    fp16: bool = knob(False, flag=NO_FLAG)
    """The model computes in float16; its fp16 parameters get fp32 main copies, and the loss is scaled."""

    loss_scale: float | None = None
    """Constant loss scale; unset: dynamic with --fp16, none otherwise."""

    initial_loss_scale: float = 4294967296.0
    """Dynamic loss scale: first value."""

    min_loss_scale: float = 1.0
    """Dynamic loss scale: smallest value."""

    loss_scale_window: float = 1000
    """Dynamic loss scale: steps without overflow before it doubles."""

    hysteresis: int = 2
    """Dynamic loss scale: the overflow at which it begins to halve; earlier ones only skip their step."""

    def check(self) -> list[Violation]:
        """Rules among these fields."""
        return [*self._check_values(), *self._check_pairs(), *self._check_precision()]

    def moment_dtype(self, name: Literal["exp_avg", "exp_avg_sq"], param_dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a moment of a main parameter of `param_dtype` is kept; fp64 parameters keep theirs."""
        return torch.bfloat16 if getattr(self, f"{name}_dtype") == "bf16" else param_dtype

    def _check_values(self) -> list[Violation]:
        """Each number lies in its own range."""
        found = []
        for name in ("lr", "min_lr", "weight_decay", "clip_grad", "adam_eps", "sgd_momentum"):
            if (getattr(self, name) or 0.0) < 0.0:
                found.append(violation(self, name, "must not be negative", "use 0 or more"))
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                found.append(violation(self, name, "must be positive", "use a number above 0"))
        for name in ("adam_beta1", "adam_beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                found.append(violation(self, name, "must lie in [0, 1)", "use 0.9 or 0.95, say"))
        return found

    def _check_precision(self) -> list[Violation]:
        """What the precision-aware optimizer needs, and what needs it."""
        found = []
        if not self.use_precision_aware_optimizer:
            for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
                if getattr(self, name) != "fp32":
                    names, remedy = f"{name} use_precision_aware_optimizer", "add --use-precision-aware-optimizer"
                    found.append(violation(self, names, "other optimizers keep fp32", remedy))
            return found
        if not self.use_distributed_optimizer:
            names = "use_precision_aware_optimizer use_distributed_optimizer"
            found.append(violation(self, names, "it updates shards", "add --use-distributed-optimizer"))
        if self.optimizer != "adam":
            names = "use_precision_aware_optimizer optimizer"
            found.append(violation(self, names, "it is a form of Adam", "use --optimizer adam"))
        if self.main_grads_dtype == "bf16" and not self.bf16:
            names = "main_grads_dtype bf16"
            found.append(violation(self, names, "gradients of a bf16 model only", "add --bf16 or use fp32"))
        return found

    def _check_pairs(self) -> list[Violation]:
        """Fields that exclude or bound each other."""
        found = []
        if self.bf16 and self.fp16:
            found.append(violation(self, "bf16 fp16", "a run has one compute precision", "drop --bf16 or --fp16"))
        if self.lr is not None and self.min_lr > self.lr:
            found.append(violation(self, "min_lr lr", "the rate decays to min_lr", "lower --min-lr or raise --lr"))
        names = "decoupled_min_lr decoupled_lr"
        if self.decoupled_lr is None and self.decoupled_min_lr is not None:
            found.append(violation(self, names, "it bounds a rate that is not set", "add --decoupled-lr"))
        if self.decoupled_lr is not None and (self.decoupled_min_lr or 0.0) > self.decoupled_lr:
            found.append(violation(self, names, "the rate decays to its minimum", "lower --decoupled-min-lr"))
        if self.min_loss_scale > self.initial_loss_scale:
            names = "min_loss_scale initial_loss_scale"
            found.append(violation(self, names, "the scale starts above its floor", "lower --min-loss-scale"))
        return found
