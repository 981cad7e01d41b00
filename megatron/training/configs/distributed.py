"""Process groups of a run."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob

MINUTES_OF_A_YEAR = 525_600


@dataclasses.dataclass(kw_only=True)
class DistributedConfig(ConfigTopic):
    """Process groups."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """Library of the collectives; on a CPU it is gloo."""

    distributed_timeout_minutes: int = 10
    """Time limit of a collective, in every group."""

    use_tp_pp_dp_mapping: bool = False
    """Order ranks as tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""

    use_gloo_process_groups: bool = knob(True, flag="--disable-gloo-process-groups")
    """Gloo carries what lives on the host of a GPU run; the flag leaves it out."""

    def check(self) -> list[Violation]:
        """Limits are positive, and no longer than clocks of libraries count."""
        if 1 <= self.distributed_timeout_minutes <= MINUTES_OF_A_YEAR:
            return []
        limits = f"from 1 to {MINUTES_OF_A_YEAR}, a year"
        remedy = "set --distributed-timeout-minutes to such a number"
        return [violation(self, "distributed_timeout_minutes", limits, remedy)]
