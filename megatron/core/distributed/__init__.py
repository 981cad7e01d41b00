"""Data parallelism: gradient buffers, their reduction and the finalisation of a step's gradients."""

from megatron.core.distributed.ddp_config import DistributedDataParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"]
