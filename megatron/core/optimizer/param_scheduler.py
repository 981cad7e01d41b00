"""Learning rate and weight decay as functions of the samples consumed so far.

Let n be the samples, W the warm-up, D the decay length (it includes the warm-up), r = (n - W) / (D - W):

    n <= W, W > 0            init + (max - init) * n / W
    constant                 max
    n > D                    min
    inverse-square-root      max(min, max * sqrt(max(W, 1)) / sqrt(max(n, 1)))
    otherwise                min + c * (max - min), with c below

    linear   c = 1 - r          cosine  c = (cos(pi r) + 1) / 2
    WSD      c = 1 up to D - wsd; then with q = (n - (D - wsd)) / wsd:
             linear 1 - q,  cosine (cos(pi q) + 1) / 2,  exponential 2 * 0.5^q - 1,  minus_sqrt 1 - sqrt(q)

The first step uses n = 0. Decoupled groups bring their own maximum and minimum.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from megatron.core.errors import CheckpointError, ConfigError


class HasParamGroups(Protocol):
    """What the scheduler needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups whose `lr` and `weight_decay` are set here."""
        ...


DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
}
ANNEAL_SHAPES: dict[str, Callable[[float], float]] = {
    **DECAY_SHAPES,
    "exponential": lambda q: 2.0 * 0.5**q - 1.0,
    "minus_sqrt": lambda q: 1.0 - math.sqrt(q),
}
DECAY_STYLES = ("constant", "inverse-square-root", "WSD", *DECAY_SHAPES)
WD_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda r: 1.0,
    "linear": lambda r: r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * (1.0 - r)) + 1.0),
}

SETTINGS = (
    "init_lr",
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "wsd_decay_steps",
    "lr_wsd_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_steps",
    "wd_incr_style",
)
"""The attributes that make up a schedule; they are saved, and compared or taken over when a run resumes."""


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of every group, now and after each `step`. All lengths are in samples."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = False,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        """Check the settings and apply the values of sample 0."""
        self.optimizer = optimizer
        self.init_lr = init_lr
        self.max_lr = max_lr
        self.min_lr = min_lr
        self.lr_warmup_steps = lr_warmup_steps
        self.lr_decay_steps = lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.start_wd = start_wd
        self.end_wd = end_wd
        self.wd_incr_steps = wd_incr_steps
        self.wd_incr_style = wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.wsd_decay_steps = wsd_decay_steps
        self.lr_wsd_decay_style = lr_wsd_decay_style
        self.num_steps = 0
        self._check()
        self.step(0)

    def _check(self) -> None:
        """Refuse settings that define no schedule."""
        _check_choice("lr_decay_style", self.lr_decay_style, DECAY_STYLES)
        _check_choice("weight_decay_incr_style", self.wd_incr_style, tuple(WD_SHAPES))
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise ConfigError(f"min_lr={self.min_lr} with lr={self.max_lr}: the rate decays to min_lr; lower --min-lr.")
        if self.init_lr > self.max_lr:
            raise ConfigError(
                f"lr_warmup_init={self.init_lr} with lr={self.max_lr}: the warm-up rises; lower --lr-warmup-init."
            )
        if not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            raise ConfigError(
                f"lr_warmup={self.lr_warmup_steps} with lr_decay={self.lr_decay_steps} (samples): the decay length "
                "includes the warm-up; shorten the warm-up or lengthen the decay."
            )
        if not 0.0 <= self.start_wd <= self.end_wd:
            raise ConfigError(
                f"start_weight_decay={self.start_wd} with end_weight_decay={self.end_wd}: the decay grows; swap them."
            )
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ConfigError(
                f"weight_decay_incr_style='constant' with start_weight_decay={self.start_wd} and "
                f"end_weight_decay={self.end_wd}: a constant has one value; drop both or choose linear or cosine."
            )
        if self.use_checkpoint_opt_param_scheduler and self.override_opt_param_scheduler:
            raise ConfigError(
                "use_checkpoint_opt_param_scheduler=True with override_opt_param_scheduler=True: the schedule comes "
                "either from the checkpoint or from the command line; drop one of the two flags."
            )
        if self.lr_decay_style == "WSD":
            _check_choice("lr_wsd_decay_style", self.lr_wsd_decay_style, tuple(ANNEAL_SHAPES))
            if not self.wsd_decay_steps or self.wsd_decay_steps > self.lr_decay_steps:
                raise ConfigError(
                    f"lr_wsd_decay={self.wsd_decay_steps} with lr_decay={self.lr_decay_steps} (samples): WSD anneals "
                    "over the end of the decay length; set --lr-wsd-decay-iters between 1 and it."
                )

    # Values.

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Learning rate of a group now."""
        max_lr = param_group.get("max_lr", self.max_lr)
        min_lr = param_group.get("min_lr", self.min_lr)
        n, warmup, decay = self.num_steps, self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and n <= warmup:
            return self.init_lr + (max_lr - self.init_lr) * n / warmup
        if self.lr_decay_style == "constant":
            return max_lr
        if n > decay:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(n, 1)))
        return min_lr + self._coefficient(n, warmup, decay) * (max_lr - min_lr)

    def _coefficient(self, n: int, warmup: int, decay: int) -> float:
        """Where the rate stands between minimum (0) and maximum (1)."""
        if self.lr_decay_style != "WSD":
            return DECAY_SHAPES[self.lr_decay_style]((n - warmup) / (decay - warmup))
        assert self.wsd_decay_steps, f"WSD was checked to have a length, got {self.wsd_decay_steps}"
        assert self.lr_wsd_decay_style, f"WSD was checked to have a shape, got {self.lr_wsd_decay_style}"
        start = decay - self.wsd_decay_steps
        if n <= start:
            return 1.0
        return ANNEAL_SHAPES[self.lr_wsd_decay_style]((n - start) / self.wsd_decay_steps)

    def get_wd(self) -> float:
        """Weight decay now, before a group's multiplier."""
        if self.num_steps > self.wd_incr_steps or self.wd_incr_style == "constant":
            return self.end_wd
        ratio = self.num_steps / self.wd_incr_steps if self.wd_incr_steps > 0 else 1.0
        return self.start_wd + WD_SHAPES[self.wd_incr_style](ratio) * (self.end_wd - self.start_wd)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and set the values of every group."""
        self.num_steps += increment
        weight_decay = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)
            group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the settings, and the bounds of decoupled groups."""
        return {
            "num_steps": self.num_steps,
            **{name: getattr(self, name) for name in SETTINGS},
            "decoupled": self._decoupled_bounds(),
        }

    def _decoupled_bounds(self) -> list[float] | None:
        for group in self.optimizer.param_groups:
            if "max_lr" in group:
                return [group["max_lr"], group["min_lr"]]
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position.

        With `override` the settings of this run stay, with `use_checkpoint` the saved ones replace them, with neither
        they must agree. Raises: CheckpointError listing every difference with both values.
        """
        saved = {**{name: state_dict[name] for name in SETTINGS}, "decoupled": state_dict["decoupled"]}
        own = {**{name: getattr(self, name) for name in SETTINGS}, "decoupled": self._decoupled_bounds()}
        if self.use_checkpoint_opt_param_scheduler:
            self._take_over(saved)
        elif not self.override_opt_param_scheduler:
            _refuse_differences(own, saved)
        self.num_steps = 0
        self.step(state_dict["num_steps"])

    def _take_over(self, saved: dict[str, Any]) -> None:
        for name in SETTINGS:
            setattr(self, name, saved[name])
        for group in self.optimizer.param_groups:
            if "max_lr" in group:
                bounds = saved["decoupled"] or [self.max_lr, self.min_lr]
                group["max_lr"], group["min_lr"] = bounds


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: not a known style; use one of {', '.join(choices)}.")


def _refuse_differences(own: dict[str, Any], saved: dict[str, Any]) -> None:
    differing = [f"{name}: {own[name]} here, {saved[name]} saved" for name in own if own[name] != saved[name]]
    if differing:
        raise CheckpointError(
            f"the schedule of this run differs from the checkpoint's ({'; '.join(differing)}); pass "
            "--override-opt-param-scheduler for this run's or --use-checkpoint-opt-param-scheduler for the saved one."
        )
