"""The flat configuration of a model: all topics in one class, under upstream's name."""

import dataclasses

from megatron.core.configs.architecture import ArchitectureConfig
from megatron.core.configs.base import Violation, violation
from megatron.core.configs.compat import judge
from megatron.core.configs.cuda_graph import CudaGraphConfig
from megatron.core.configs.fp8 import Fp8Config
from megatron.core.configs.moe import MoEConfig
from megatron.core.configs.overlap import NUM_COMM_SMS
from megatron.core.configs.parallel import ModelParallelConfig
from megatron.core.configs.recompute import RecomputeConfig
from megatron.core.pipeline_layout import derive_num_chunks, layout_problem

_OTHER_SPELLINGS = {"allgather": "all_gather"}


@dataclasses.dataclass(kw_only=True)
class TransformerConfig(
    CudaGraphConfig, MoEConfig, Fp8Config, RecomputeConfig, ArchitectureConfig, ModelParallelConfig
):
    """Everything that the modules of a model read; construction derives open values and reports all violations."""

    @property
    def draws_in_forward(self) -> bool:
        """True if the layers draw random numbers in training."""
        drawing = (
            self.hidden_dropout,
            self.attention_dropout,
            self.moe_input_jitter_eps,
            self.moe_router_force_load_balancing,
            self.moe_router_force_biased,
        )
        return any(drawing)

    def derive(self) -> None:
        """Values that follow from other topics."""
        self.fill("moe_ffn_hidden_size", self.ffn_hidden_size, "ffn_hidden_size")
        derive_num_chunks(self)
        if self.overlap_moe_expert_parallel_comm:
            self.fill("moe_flex_dispatcher_num_sms", NUM_COMM_SMS, "overlap_moe_expert_parallel_comm")

    def check(self) -> list[Violation]:
        """The rules that span topics."""
        problem = layout_problem(self)
        return judge(self) + ([] if problem is None else [violation(self, *problem)])

    @property
    def cp_comm_types(self) -> list[str]:
        """How attention of each layer reaches other context-parallel ranks, in one spelling."""
        value = self.cp_comm_type
        given = list(value) if isinstance(value, list) else [value] * (self.num_layers or 0)
        return [_OTHER_SPELLINGS.get(name, name) for name in given]
