"""How the model is spread over ranks, on which device and how it is driven: upstream's ModelParallelConfig."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from megatron.core.configs.base import Violation, violation
from megatron.core.configs.flag_spec import NO_FLAG, knob
from megatron.core.configs.overlap import OverlapConfig
from megatron.core.configs.pipeline import PipelineConfig

CpCommType = Literal["p2p", "all_gather", "allgather", "a2a", "a2a+p2p"]


@dataclasses.dataclass(kw_only=True)
class ModelParallelConfig(OverlapConfig, PipelineConfig):
    """Parallelism of the model."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each weight matrix (TP)."""

    context_parallel_size: int = 1
    """Ranks that share each sequence (CP)."""

    cp_comm_type: CpCommType | list[CpCommType] = knob("p2p")
    """How attention reaches the keys of other CP ranks: p2p (ring), all_gather (also written allgather), or a2a (swap
    positions for heads); one for all layers or one for each."""

    sequence_parallel: bool = False
    """Shard the activations of norms and dropout over the TP ranks; without TP it is switched off."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer (EP)."""

    expert_tensor_parallel_size: int = knob(None)
    """TP inside an expert (ETP); unset: the TP size."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""

    init_device: Literal["cpu", "device"] = "cpu"
    """Where initial weights are drawn: on the CPU (same bits everywhere) or on the accelerator (large models)."""

    perform_initialization: bool = knob(True, flag="--no-initialization")
    """Draw the initial weights; the flag leaves them unset, for a model that is about to load a checkpoint."""

    calculate_per_token_loss: bool = False
    """Normalise the loss by the token count of the global batch instead of averaging per-microbatch means."""

    deterministic_mode: bool = False
    """Use kernels that repeat bit for bit, and check the environment variables that could prevent it."""

    gradient_accumulation_fusion: bool = knob(True, flag="--no-gradient-accumulation-fusion")
    """Add weight gradients to main gradients inside their GEMM; the flag rounds them to the parameter's dtype first."""

    cross_entropy_loss_fusion: bool = False
    """Score logits with kernels that read them once in each direction and keep no fp32 softmax, on a GPU."""

    finalize_model_grads_func: Callable[..., Any] | None = knob(None, flag=NO_FLAG)
    """Called by the schedule after the last microbatch: reduces gradients and runs the step hooks."""

    grad_scale_func: Callable[..., Any] | None = knob(None, flag=NO_FLAG)
    """Multiplies the loss before backward; the optimizer's loss scaling."""

    no_sync_func: Callable[..., Any] | None = knob(None, flag=NO_FLAG)
    """Context manager under which backward leaves gradients unreduced."""

    def derive(self) -> None:
        """Resolve the sizes that follow from others."""
        self.fill("expert_tensor_parallel_size", self.tensor_model_parallel_size, "tensor_model_parallel_size")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            self.replace("sequence_parallel", False, "tensor_model_parallel_size=1: nothing to shard over")
        if isinstance(self.cp_comm_type, list) and len(self.cp_comm_type) == 1:
            self.replace("cp_comm_type", self.cp_comm_type[0], "a list of one")

    def check(self) -> list[Violation]:
        """Sizes are positive."""
        sizes = (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )
        wrong = [name for name in sizes if getattr(self, name) < 1 and name not in self.origins]
        return [
            violation(self, name, "a group has at least one rank", f"set --{name.replace('_', '-')} to 1 or more")
            for name in wrong
        ]
