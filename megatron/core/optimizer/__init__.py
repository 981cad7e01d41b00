"""Optimizers: parameter groups, loss scaling, clipping, the step and the schedules of rate and decay."""

from collections.abc import Sequence

import torch

from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, require_sharded
from megatron.core.optimizer.optimizer import BuildAdam, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.core.optimizer.precision_aware_adam import PrecisionAwareAdam
from megatron.core.process_groups_config import ProcessGroupCollection

__all__ = [
    "DistributedOptimizer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "get_megatron_optimizer",
]


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None = None,
    build_adam: BuildAdam = PrecisionAwareAdam,
) -> MegatronOptimizer:
    """Build the optimizer over the trainable parameters of all chunks; every rank must call it.

    `build_adam` makes the inner optimizer of `use_precision_aware_optimizer`, see `MegatronOptimizer`.
    """
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    named = [pair for chunk in model_chunks for pair in named_global_parameters(chunk) if pair[1].requires_grad]
    if config.use_distributed_optimizer:
        return DistributedOptimizer(config, named, groups, require_sharded(model_chunks), build_adam)
    return MegatronOptimizer(config, named, groups, build_adam)
