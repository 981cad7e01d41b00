"""Which experts of the model a rank holds, and under which names their parameters are known everywhere.

Expert parallelism gives rank r of W the experts r * n ... r * n + n - 1. A parameter is called by its *global* expert,
`linear_fc1.weight{e}`, whether the experts run grouped (local name `linear_fc1.weight{i}`) or one after the other
(`local_experts.{i}.linear_fc1.weight`): both load the same checkpoint and start from the same weights. What else an
expert keeps, its amaxes for FP8, is `local_experts.{e}.linear_fc1.fp8...`.
"""

import re

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.groups import group_rank, group_size

_GROUPED = re.compile(r"(linear_fc[12]\.(?:weight|bias))(\d+)")
_SEQUENTIAL = re.compile(r"local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_OF_ONE_EXPERT = re.compile(r"local_experts\.(\d+)\.(.+)")


class ExpertNumbering:
    """Mixin of the expert modules: local to global expert ids, and `global_name`."""

    num_local_experts: int
    first_expert: int

    def number_experts(
        self, num_local_experts: int, pg_collection: ProcessGroupCollection | None
    ) -> ProcessGroupCollection:
        """Record which experts are here and return the process groups."""
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        self.num_local_experts = num_local_experts
        self.first_expert = group_rank(groups.ep) * num_local_experts
        return groups

    def global_name(self, local_name: str) -> str:
        """Name in the unsharded model of the parameter or buffer `local_name` below this module."""
        if match := _GROUPED.fullmatch(local_name):
            stem, index = match.group(1), match.group(2)
        elif match := _SEQUENTIAL.fullmatch(local_name):
            stem, index = match.group(2), match.group(1)
        elif match := _OF_ONE_EXPERT.fullmatch(local_name):
            return f"local_experts.{self.first_expert + int(match.group(1))}.{match.group(2)}"
        else:
            return local_name
        return f"{stem}{self.first_expert + int(index)}"


def is_reduced_like_dense(groups: ProcessGroupCollection) -> bool:
    """True if an expert's gradient is reduced over the same ranks as a dense parameter's (EP 1 and ETP = TP)."""
    return group_size(groups.ep) == 1 and group_size(groups.expt_tp) == group_size(groups.tp)
