"""Process groups of a run."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob


@dataclasses.dataclass(kw_only=True)
class DistributedConfig(ConfigTopic):
    """Process groups."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """Library of the collectives; on a CPU it is gloo."""

    distributed_timeout_minutes: int = 10
    """Time limit of a collective, in every group."""

    use_tp_pp_dp_mapping: bool = False
    """Order ranks as tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""

    world_size: int = knob(None)
    """Processes that a tool assumes; a training run takes WORLD_SIZE of its launcher."""

    use_gloo_process_groups: bool = knob(True, flag="--disable-gloo-process-groups")
    """Gloo carries what lives on the host of a GPU run; the flag leaves it out."""

    def check(self) -> list[Violation]:
        """Limits and sizes are positive."""
        found = []
        for name in ("distributed_timeout_minutes", "world_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                remedy = f"set --{name.replace('_', '-')} to 1 or more"
                found.append(violation(self, name, "at least 1", remedy))
        return found
