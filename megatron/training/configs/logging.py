"""What a run reports, where to, and how often."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob


@dataclasses.dataclass(kw_only=True)
class LoggingConfig(ConfigTopic):
    """Logging."""

    log_interval: int = 100
    """Steps between log lines."""

    log_throughput: bool = False
    """Add the TFLOP/s of a GPU to the log line."""

    log_params_norm: bool = False
    """Add the norm of the parameters."""

    log_state_hash: bool = False
    """Add a hash of weights, gradients, expert bias and moments."""

    log_overlap: bool = False
    """Add the share of expert communication that is hidden; it waits for the device each step, to measure it."""

    logging_level: int | None = None
    """Level of Python's logging, as a number."""

    timing_log_level: Literal[0, 1, 2] = 0
    """0: only the iteration is timed, 1: coarse parts, 2: everything."""

    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """How times of the ranks are combined."""

    tensorboard_dir: str | None = None
    """Folder of the TensorBoard events."""

    tensorboard_log_interval: int = 1
    """Steps between scalars."""

    tensorboard_queue_size: int = 1000
    """Events that wait before they are written."""

    log_timers_to_tensorboard: bool = False
    """Write times too."""

    log_memory_to_tensorboard: bool = False
    """Write statistics of the allocator too."""

    log_validation_ppl_to_tensorboard: bool = False
    """Write the perplexity of evaluations too."""

    log_loss_scale_to_tensorboard: bool = knob(
        True, flag="--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard"
    )
    """Write the loss scale; the flag leaves it out."""

    log_world_size_to_tensorboard: bool = False
    """Write the number of ranks too."""

    wandb_project: str | None = None
    """Project at Weights & Biases; unset or empty: not used."""

    wandb_exp_name: str | None = None
    """Name of the run there."""

    wandb_entity: str | None = None
    """Entity of the run there."""

    wandb_save_dir: str | None = None
    """Local folder of the run."""

    def check(self) -> list[Violation]:
        """Intervals are positive, a W&B run has a name."""
        found = []
        for name in ("log_interval", "tensorboard_log_interval", "tensorboard_queue_size"):
            if getattr(self, name) < 1:
                remedy = f"set --{name.replace('_', '-')} to 1 or more"
                found.append(violation(self, name, "at least 1", remedy))
        if self.wandb_project and not self.wandb_exp_name:
            remedy = "set --wandb-exp-name"
            found.append(violation(self, "wandb_project wandb_exp_name", "a run there has a name", remedy))
        return found
