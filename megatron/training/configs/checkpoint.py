"""Where checkpoints are written and read, what they hold, and how strictly they must fit."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob


@dataclasses.dataclass(kw_only=True)
class CheckpointConfig(ConfigTopic):
    """Checkpoints."""

    save: str | None = None
    """Folder that checkpoints are written to; unset: the weights are lost at the end of the run."""

    save_interval: int | None = knob(None, flag="--save-interval --persistent-save-interval")
    """Steps between saves; the last step is saved in any case."""

    save_retain_interval: int | None = None
    """Keep only checkpoints whose iteration is a multiple of this, and the newest."""

    async_save: bool = False
    """Write in the background; the run goes on once its state is copied."""

    ckpt_fully_parallel_save: bool = knob(True, flag="--no-ckpt-fully-parallel-save")
    """Let the lowest of the ranks that hold the same values write them, instead of spreading the bytes over all."""

    ckpt_fully_parallel_load: bool = False
    """Read each part of the files on one rank only and exchange it, instead of on every rank that needs it."""

    verify_integrity: bool = False
    """Compare the checksums of all that is read from a checkpoint; bytes that changed on the disk end the load."""

    log_progress: bool = False
    """Add a line to progress.txt in the folder of --save at the start and after each save."""

    load: str | None = None
    """Folder that a run continues from; without a checkpoint in it the run starts fresh."""

    ckpt_step: int | None = None
    """Load this iteration instead of the newest."""

    ckpt_fallback: bool = False
    """Load the newest complete checkpoint if the one that the tracker names is missing or was not saved to its end."""

    exit_on_missing_checkpoint: bool = False
    """Refuse to start fresh if --load holds no checkpoint."""

    pretrained_checkpoint: str | None = None
    """Folder of initial weights, read when --load holds no checkpoint."""

    finetune: bool = False
    """Load the weights only and count from iteration 0."""

    no_save_optim: bool | None = None
    """Leave the optimizer state out of checkpoints."""

    no_save_rng: bool | None = None
    """Leave the random generators out of checkpoints."""

    no_load_optim: bool | None = None
    """Start with a fresh optimizer state."""

    no_load_rng: bool | None = None
    """Start with generators from --seed."""

    use_checkpoint_args: bool = False
    """Take the flags of the model and the tokenizer from the checkpoint; it wins over the command line."""

    dist_ckpt_strictness: Literal[
        "raise_all", "raise_unexpected", "assume_ok_unexpected", "log_all", "log_unexpected", "ignore_all"
    ] = "raise_all"
    """What missing and unexpected keys of a checkpoint lead to."""

    override_opt_param_scheduler: bool = knob(
        False, flag="--override-opt-param-scheduler --override-opt_param-scheduler"
    )
    """On resume take the schedule from the command line."""

    use_checkpoint_opt_param_scheduler: bool = knob(
        False, flag="--use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler"
    )
    """On resume take the schedule from the checkpoint."""

    def check(self) -> list[Violation]:
        """Each setting has the folder it speaks of, and intervals are positive."""
        found = self._check_values()
        needs = (
            ("save", ("save_interval", "save_retain_interval", "async_save", "log_progress")),
            ("load", ("ckpt_step", "ckpt_fallback", "exit_on_missing_checkpoint", "use_checkpoint_args")),
        )
        for folder, names in needs:
            for name in names:
                if getattr(self, folder) is None and getattr(self, name):
                    found.append(violation(self, f"{name} {folder}", f"needs --{folder}", f"set --{folder}"))
        if self.save_interval and self.save_retain_interval and self.save_retain_interval % self.save_interval:
            remedy = "make --save-retain-interval a multiple of --save-interval"
            found.append(violation(self, "save_retain_interval save_interval", "only saved steps are kept", remedy))
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            names = "override_opt_param_scheduler use_checkpoint_opt_param_scheduler"
            found.append(violation(self, names, "two sources of one schedule", "keep one of the two flags"))
        return found

    def _check_values(self) -> list[Violation]:
        """Folders have names, and steps are counted from 1."""
        found = []
        for name in ("save", "load", "pretrained_checkpoint"):
            if getattr(self, name) == "":
                remedy = f"name a folder after --{name.replace('_', '-')} or drop it"
                found.append(violation(self, name, "an empty word is no folder", remedy))
        if self.ckpt_step is not None and self.ckpt_step < 1:
            remedy = "name a saved iteration with --ckpt-step"
            found.append(violation(self, "ckpt_step", "iterations are counted from 1", remedy))
        for name in ("save_interval", "save_retain_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(violation(self, name, "a number of steps, at least 1", "raise it or drop the flag"))
        return found
