"""The distributed optimizer (ZeRO-1): the optimizer's step, applied by each rank to its shard of every bucket.

    backward         gradients of all parameters, reduce-scattered bucket by bucket
    step, 1 to 4     as the plain optimizer, on shards; the norm adds up the shards of all ranks
    step, 5          update the shards, then all-gather the parameters of dense and expert buckets
                     with fp8_param_gather the weights of FP8 layers travel as codes (`fp8_param_gather.py`)
    next forward     with overlap_param_gather a bucket is waited for when forward comes to it

Weights and moments are bitwise those of the plain optimizer where the two collectives sum in the same order: updates
are element by element, and the norm is summed in fp64 and rounded once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from megatron.core.distributed import DistributedDataParallel
from megatron.core.errors import ConfigError
from megatron.core.optimizer.main_params import MainParams
from megatron.core.optimizer.optimizer import MAIN_GRAD, MAIN_PARAM, BuildAdam, MegatronOptimizer, ParamState
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.precision_aware_adam import PrecisionAwareAdam
from megatron.core.optimizer.sharded_params import BucketShard, ShardedMainParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import all_gather


def require_sharded(model_chunks: Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """The chunks, if their buckets are sharded.

    Raises: ConfigError if one is not wrapped, or wrapped without the distributed optimizer.
    """
    chunks = []
    for chunk in model_chunks:
        if not (isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer):
            raise ConfigError(
                f"use_distributed_optimizer=True with a model chunk of type {type(chunk).__name__}: shards are cut "
                "from the buckets of a wrapper; wrap each chunk in DistributedDataParallel with "
                "DistributedDataParallelConfig(use_distributed_optimizer=True)."
            )
        chunks.append(chunk)
    return chunks


class DistributedOptimizer(MegatronOptimizer):
    """`MegatronOptimizer` over shards; `param_groups` and `named_state` hold what this rank updates."""

    def __init__(
        self,
        config: OptimizerConfig,
        named_params: Iterable[tuple[str, torch.nn.Parameter]],
        pg_collection: ProcessGroupCollection,
        model_chunks: Sequence[DistributedDataParallel],
        build_adam: BuildAdam = PrecisionAwareAdam,
    ) -> None:
        """Cut the shards, then as the plain optimizer."""
        named_params = list(named_params)
        self._chunks = model_chunks
        self._names = {param: name for name, param in named_params}
        super().__init__(config, named_params, pg_collection, build_adam)
        # every element of a gradient lies on one rank, so sums run over the world instead of the model parallel groups
        self.norm_groups = replace(pg_collection, mp=pg_collection.world, tp_ep_pp=pg_collection.world)

    def _build_main(self, params: Iterable[torch.nn.Parameter]) -> MainParams | ShardedMainParams:
        self._sharded = ShardedMainParams(self._chunks, params, self.config.use_precision_aware_optimizer)
        return self._sharded

    def named_state(self) -> Iterator[ParamState]:
        """As the plain optimizer's, with flat tensors [n] and the range of elements that they are."""
        for state in super().named_state():
            yield state._replace(flat_range=self._sharded.parts[state.param].flat_range)

    def whole_state(self) -> Iterator[ParamState]:
        """As the plain optimizer's; gathers one bucket of one kind at a time, every rank must exhaust it."""
        for chunk in self._chunks:
            chunk.finish_param_sync()
        local = {state.param: state.tensors for state in self.named_state()}
        for shard in self._sharded.shards:
            whole = {kind: self._gather(shard, local, kind) for kind in self._dtypes(shard)}
            assert shard.bucket.sharded is not None, f"bucket {shard.bucket.index} is not sharded"
            for offset, param in zip(shard.bucket.sharded.offsets, shard.params, strict=True):
                place = slice(offset, offset + param.numel())
                tensors = {kind: data[place].view(param.shape) for kind, data in whole.items()}
                scalars = {key: value for key, value in local.get(param, {}).items() if value.dim() == 0}
                yield ParamState(self._names[param], param, tensors | scalars)

    def _dtypes(self, shard: BucketShard) -> dict[str, torch.dtype]:
        """Kinds of tensors of a bucket with their dtypes, also on a rank whose shard is padding."""
        main = shard.main_shard.dtype
        dtypes = {MAIN_GRAD: shard.bucket.grad_data.dtype}
        if self.config.optimizer == "sgd":
            dtypes["momentum_buffer"] = main
        else:
            dtypes["exp_avg"] = self.config.moment_dtype("exp_avg", main)
            dtypes["exp_avg_sq"] = self.config.moment_dtype("exp_avg_sq", main)
        return dtypes | ({MAIN_PARAM: main} if shard.is_copied else {})

    def _gather(
        self, shard: BucketShard, local: dict[torch.nn.Parameter, dict[str, torch.Tensor]], kind: str
    ) -> torch.Tensor:
        """The whole bucket [elements] of one kind of tensor."""
        if kind == MAIN_GRAD:
            part_of_rank = shard.bucket.grad_shard
        else:
            part_of_rank = torch.zeros_like(shard.main_shard, dtype=self._dtypes(shard)[kind])
            for param, part in shard.parts.items():
                begin = part.main.storage_offset() - shard.main_shard.storage_offset()
                part_of_rank[begin : begin + part.main.numel()] = local[param][kind]
        whole = part_of_rank.new_empty(shard.bucket.grad_data.numel())
        all_gather(whole, part_of_rank, shard.bucket.group)
        return whole
