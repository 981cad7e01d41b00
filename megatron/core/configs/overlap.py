"""Expert communication of one microbatch behind the compute of another."""

import dataclasses
from collections import Counter
from collections.abc import Callable

from megatron.core.configs.base import ConfigTopic
from megatron.core.configs.flag_spec import NO_FLAG, knob

NUM_COMM_SMS = 16
"""Multiprocessors of the device that the exchange has for itself beside the experts of another microbatch."""
MOST_COMM_SMS = 64


@dataclasses.dataclass(kw_only=True)
class OverlapConfig(ConfigTopic):
    """Expert communication hidden behind another microbatch: the combined schedule."""

    overlap_moe_expert_parallel_comm: bool = False
    """Run the forward of one microbatch beside the backward of another, so that dispatch and combine are hidden."""

    delay_wgrad_compute: bool = False
    """Put weight gradients off until they cover communication; needs --overlap-moe-expert-parallel-comm."""

    ep_overlap_early_attn_memory_release: bool = False
    """Run the backward of attention before the experts of the other microbatch: less memory, less is hidden."""

    high_priority_a2a_comm_stream: bool = False
    """Give the communication stream priority on the device."""

    count_func: Callable[[Counter[str]], None] | None = knob(None, flag=NO_FLAG)
    """Told by the combined schedule, once a step, what happened how often."""
