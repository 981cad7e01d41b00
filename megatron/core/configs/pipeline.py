"""How the layers are dealt out to pipeline stages and how stages send: one topic.

Which layer runs where is worked out in `core/pipeline_layout.py`.
"""

import dataclasses

import torch

from megatron.core.configs.base import Violation, violation
from megatron.core.configs.flag_spec import NO_FLAG, knob
from megatron.core.configs.precision import PrecisionConfig

VPP = "virtual_pipeline_model_parallel_size"


@dataclasses.dataclass(kw_only=True)
class PipelineConfig(PrecisionConfig):
    """Pipeline parallelism."""

    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers as stages (PP)."""

    virtual_pipeline_model_parallel_size: int | None = knob(None, flag="--num-virtual-stages-per-pipeline-rank")
    """Chunks of layers on each pipeline rank (VPP)."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers in each chunk, another way to say how many chunks a pipeline rank has."""

    pipeline_model_parallel_layout: str | None = None
    """The stages one by one, as in "Ett|ttt|ttL": E embedding, t decoder layer, L loss, x*n or (...)*n repeats."""

    num_layers_in_first_pipeline_stage: int | None = knob(
        None, flag="--decoder-first-pipeline-num-layers", dest="decoder_first_pipeline_num_layers"
    )
    """Layers of the first pipeline rank; the others share the rest."""

    num_layers_in_last_pipeline_stage: int | None = knob(
        None, flag="--decoder-last-pipeline-num-layers", dest="decoder_last_pipeline_num_layers"
    )
    """Layers of the last pipeline rank; the others share the rest."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when the layers are split evenly."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and loss as a layer when the layers are split evenly."""

    microbatch_group_size_per_vp_stage: int | None = knob(
        None, flag="--microbatch-group-size-per-virtual-pipeline-stage"
    )
    """Microbatches that run through one chunk before the next chunk has its turn; unset: the PP size."""

    overlap_p2p_comm: bool = knob(True, flag="--no-overlap-p2p-communication")
    """Wait for a message where it is read; the flag waits where it is posted."""

    batch_p2p_comm: bool = knob(None, flag=NO_FLAG)
    """Post messages that follow each other as one batch, on the communicator of all stages; unset: without overlap."""

    pipeline_dtype: torch.dtype = knob(None, flag=NO_FLAG)
    """Dtype of the messages between stages; unset: that of the residual stream."""

    def derive(self) -> None:
        """Messages follow the residual stream."""
        residual = torch.float32 if self.fp32_residual_connection else self.params_dtype
        self.fill("pipeline_dtype", residual, "params_dtype and fp32_residual_connection")
        self.fill("batch_p2p_comm", not self.overlap_p2p_comm, "overlap_p2p_comm")
        if self.virtual_pipeline_model_parallel_size == 1:
            self.replace(VPP, None, f"{VPP}=1: one chunk is no interleaving")

    def check(self) -> list[Violation]:
        """Chunks need stages, and nothing that only chunks read is given without them."""
        found = []
        for name, flag, why in (
            ("num_layers_per_virtual_pipeline_stage", "num-layers-per-virtual-pipeline-stage", "a chunk has layers"),
            (VPP, "num-virtual-stages-per-pipeline-rank", "a pipeline rank has at least one chunk of layers"),
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                found.append(violation(self, name, why, f"set --{flag} to 1 or more, or drop it"))
        if (self.virtual_pipeline_model_parallel_size or 1) > 1 and self.pipeline_model_parallel_size == 1:
            found.append(
                violation(
                    self,
                    f"{VPP} pipeline_model_parallel_size",
                    "chunks interleave over at least 2 stages",
                    "raise --pipeline-model-parallel-size or drop the virtual size",
                )
            )
        if self.microbatch_group_size_per_vp_stage is not None and self.virtual_pipeline_model_parallel_size is None:
            found.append(
                violation(
                    self,
                    f"microbatch_group_size_per_vp_stage {VPP}",
                    "groups of microbatches change between chunks, and a rank has one chunk",
                    "drop --microbatch-group-size-per-virtual-pipeline-stage or set "
                    "--num-virtual-stages-per-pipeline-rank",
                )
            )
        return found
