"""The main parameters of a sharded optimizer: of each bucket the shard of this rank, nothing else.

gradients      [ . . . . | shard | . . . . ]     reduced in place by the bucket's reduce-scatter
main           [ shard ]                         fp32 copy, or for fp32 and fp64 the parameters' own memory
parameters     [ . . . . | shard | . . . . ]     rounded from main, then gathered in place
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.bucket_group import BucketGroup
from megatron.core.optimizer.distrib_ranges import parts_of_shard
from megatron.core.optimizer.fp8_param_gather import install_code_gathers
from megatron.core.optimizer.main_params import HALF_DTYPES
from megatron.core.utils.groups import group_rank, group_size


@dataclass(frozen=True)
class MainPart:
    """What this rank updates of one parameter."""

    main: torch.nn.Parameter
    """[n], a view of the shard"""
    grad: torch.Tensor
    """[n], a view of the reduced gradients"""
    flat_range: tuple[int, int]
    """which elements of the flattened parameter these are"""


class BucketShard:
    """This rank's shard of one bucket."""

    def __init__(self, bucket: BucketGroup) -> None:
        """Copy what is half precision; the parts are views."""
        assert bucket.sharded is not None, f"bucket {bucket.index} is not sharded"
        assert bucket.param_shard is not None, f"bucket {bucket.index} is not sharded"
        self.bucket = bucket
        self.params = list(bucket.params.values())
        self.model_shard = bucket.param_shard
        self.is_copied = self.model_shard.dtype in HALF_DTYPES
        self.main_shard = self.model_shard.float() if self.is_copied else self.model_shard
        parts = parts_of_shard(
            bucket.sharded.offsets,
            [param.numel() for param in self.params],
            bucket.grad_data.numel(),
            group_rank(bucket.group),
            group_size(bucket.group),
        )
        self.parts: dict[torch.nn.Parameter, MainPart] = {}
        for part in parts:
            place = slice(part.position, part.position + part.end - part.begin)
            main = torch.nn.Parameter(self.main_shard[place])
            main.rounded = self.model_shard[place] if self.is_copied else None  # type: ignore[attr-defined]
            self.parts[self.params[part.number]] = MainPart(main, bucket.grad_shard[place], (part.begin, part.end))


class ShardedMainParams:
    """The main parameters of this rank, in the interface of `MainParams`."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        params: Iterable[torch.nn.Parameter],
        keeps_grad_dtype: bool = False,
    ) -> None:
        """Shard the buckets of `chunks`; `pairs` follow the order of `params`, without those of other ranks.

        With `keeps_grad_dtype` gradients are handed over as they are, in `decoupled_grad` instead of `grad`.
        """
        self.chunks = chunks
        self.keeps_grad_dtype = keeps_grad_dtype
        self.shards = [BucketShard(bucket) for chunk in chunks for bucket in chunk.bucket_groups]
        for chunk in chunks:
            if chunk.ddp_config.fp8_param_gather:
                install_code_gathers(chunk.module, chunk.bucket_groups)
        parts = {param: part for shard in self.shards for param, part in shard.parts.items()}
        self.parts = {param: parts[param] for param in params if param in parts}
        self.pairs = [(param, part.main) for param, part in self.parts.items()]

    def collect_grads(self) -> list[torch.Tensor]:
        """Point the main parameters' `grad` at the reduced gradients and return them; as in `MainParams`."""
        for part in self.parts.values():
            if self.keeps_grad_dtype:
                part.main.decoupled_grad = part.grad  # type: ignore[attr-defined]
            else:
                part.main.grad = part.grad.to(part.main.dtype)
        return [grad for _, grad in self.grads_by_param()]

    def grads_by_param(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """As in `MainParams`: the model parameter with the flat gradient [n] of this rank's part."""
        name = "decoupled_grad" if self.keeps_grad_dtype else "grad"
        return ((param, getattr(part.main, name)) for param, part in self.parts.items())

    def release_grads(self) -> None:
        """Undo `collect_grads`."""
        for part in self.parts.values():
            part.main.grad = None
            part.main.decoupled_grad = None  # type: ignore[attr-defined]

    def write_back(self, is_rounded: bool = False) -> None:
        """Round the shards into the model's and gather all parameters, dense and expert, now that all are updated.

        With `is_rounded` the update has also written the model's shards.
        """
        for shard in self.shards:
            if shard.is_copied and not is_rounded:
                shard.model_shard.copy_(shard.main_shard)
        for chunk in self.chunks:
            chunk.start_param_sync()

    def reload(self) -> None:
        """Take the main parameters anew from the model's, after weights were loaded without optimizer state."""
        for chunk in self.chunks:
            chunk.forget_codes()
        for shard in self.shards:
            if shard.is_copied:
                shard.main_shard.copy_(shard.model_shard)
