"""Plans of torch.distributed.checkpoint made from `ShardedTensor` lists: which box is written, which bytes are read.

Saving drops boxes that several ranks hold (the writer is chosen so that bytes are spread evenly) and checks that the
boxes of a key tile its global tensor. Loading intersects the boxes a rank wants with the boxes in the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.mapping import ShardedTensor


def _index(tensor: ShardedTensor) -> MetadataIndex:
    return MetadataIndex(tensor.key, torch.Size(tensor.global_offset))


def _chunk(tensor: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(tensor.global_offset), torch.Size(tensor.local_shape))


class ShardedSavePlanner(DefaultSavePlanner):
    """Writes each distinct box of the job once: by the holder with least to write, or by the lowest holder."""

    def __init__(self, tensors: Iterable[ShardedTensor], to_lowest_rank: bool = False) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=to_lowest_rank
        )
        self.boxes = {_index(tensor): tensor for tensor in tensors}

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box),
                    properties=TensorProperties.create_from_tensor(box.data),
                    size=torch.Size(box.global_shape),
                ),
            )
            for index, box in self.boxes.items()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Spread the boxes over the ranks.

        Raises: ValueError naming the keys whose boxes overlap or leave a hole.
        """
        plans, metadata = super().create_global_plan(all_plans)
        holes = [
            f"the boxes of {key} cover {covered} of {prod(entry.size)} elements"
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            and (covered := sum(prod(chunk.sizes) for chunk in entry.chunks)) != prod(entry.size)
        ]
        if holes:
            raise ValueError("; ".join(holes))
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index].view()


class ShardedLoadPlanner(DefaultLoadPlanner):
    """Reads the parts of the stored boxes that overlap with the wanted ones."""

    def __init__(self, tensors: Iterable[ShardedTensor], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = {_index(tensor): tensor for tensor in tensors}
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        assert self.metadata is not None, "the planner is built with metadata"
        for index, box in self.boxes.items():
            stored = self.metadata.state_dict_metadata[index.fqn]
            assert isinstance(stored, TensorStorageMetadata), f"{index.fqn} is checked to be a tensor before"
            items += create_read_items_for_chunk_list(index.fqn, stored, [_chunk(box)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index].view()

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Nothing to do: `lookup_tensor` hands out views of the destination."""
