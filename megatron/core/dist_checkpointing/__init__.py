"""Checkpoints by global name and offset: any layout saves, any layout loads."""

from megatron.core.dist_checkpointing.flat_ranges import boxes_of_range
from megatron.core.dist_checkpointing.mapping import ShardedTensor, replicated
from megatron.core.dist_checkpointing.serialization import (
    PendingSave,
    is_complete,
    load,
    load_common,
    remove,
    save,
    stored_shapes,
)
from megatron.core.dist_checkpointing.validation import Strictness

__all__ = [
    "PendingSave",
    "ShardedTensor",
    "Strictness",
    "boxes_of_range",
    "is_complete",
    "load",
    "load_common",
    "remove",
    "replicated",
    "save",
    "stored_shapes",
]
