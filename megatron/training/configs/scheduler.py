"""Schedules of the learning rate and of the weight decay; their peaks belong to OptimizerConfig."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob


@dataclasses.dataclass(kw_only=True)
class SchedulerConfig(ConfigTopic):
    """Schedules of learning rate and weight decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay."""

    lr_decay_iters: int = knob(None)
    """Steps of the decay, warm-up included; unset: the length of the run."""

    lr_decay_samples: int = knob(None)
    """Samples of the decay in runs by samples."""

    lr_warmup_iters: int = 0
    """Steps of the linear warm-up."""

    lr_warmup_samples: int = 0
    """Samples of the warm-up in runs by samples."""

    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay."""

    lr_warmup_init: float = 0.0
    """Learning rate at the first step of the warm-up."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay of WSD."""

    lr_wsd_decay_iters: int | None = None
    """Steps of the final decay of WSD."""

    lr_wsd_decay_samples: int | None = None
    """Samples of the final decay of WSD in runs by samples."""

    start_weight_decay: float = knob(None)
    """Weight decay at the start of a ramp."""

    end_weight_decay: float = knob(None)
    """Weight decay at the end of a ramp."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the weight decay's ramp."""

    def check(self) -> list[Violation]:
        """Each schedule has its numbers, once."""
        found = self._check_units() + self._check_weight_decay()
        if self.lr_warmup_init < 0.0:
            found.append(violation(self, "lr_warmup_init", "not negative", "set --lr-warmup-init to 0 or more"))
        return found

    def _check_units(self) -> list[Violation]:
        found = []
        for name in ("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(violation(self, name, "at least 1", f"raise --{name.replace('_', '-')} or drop it"))
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if self.lr_warmup_fraction is not None and getattr(self, name):
                flag = "--" + name.replace("_", "-")
                remedy = f"keep one of --lr-warmup-fraction and {flag}"
                found.append(violation(self, f"lr_warmup_fraction {name}", "the warm-up has one length", remedy))
            if getattr(self, name) < 0:
                remedy = f"set --{name.replace('_', '-')} to 0 or more"
                found.append(violation(self, name, "a length is not negative", remedy))
        if self.lr_warmup_fraction is not None and not 0.0 <= self.lr_warmup_fraction < 1.0:
            remedy = "set --lr-warmup-fraction to a value from 0 up to 1"
            found.append(violation(self, "lr_warmup_fraction", "a fraction of the decay", remedy))
        return found

    def _check_weight_decay(self) -> list[Violation]:
        names = "weight_decay_incr_style start_weight_decay end_weight_decay"
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            if start is None and end is None:
                return []
            remedy = "drop --start-weight-decay and --end-weight-decay, or set --weight-decay-incr-style"
            return [violation(self, names, "a constant weight decay has no ramp", remedy)]
        if start is not None and end is not None and 0.0 <= start <= end:
            return []
        remedy = "set --start-weight-decay and --end-weight-decay in rising order"
        return [violation(self, names, "a ramp needs a start and a larger end", remedy)]
