"""From the loader's dictionary to the tensors one rank works on.

Keys are taken by name, so a dataset may add fields in any order. Legend: b micro batch, s sequence length.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.core.utils.groups import group_rank, group_size
from megatron.core.utils.zigzag import own_chunks

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
"""What the model and the loss read; each is [b, s]."""

ATTENTION_MASK = "attention_mask"
"""Key of the mask [b, 1, s, s] of a loader that hides earlier documents."""


def slice_for_context_parallel(
    batch: Mapping[str, torch.Tensor], cp_rank: int, cp_size: int
) -> dict[str, torch.Tensor]:
    """Keep the part of every sequence that belongs to one context-parallel rank (see core/utils/zigzag).

    Shapes: [b, s] -> [b, s / cp_size]; the rows of an attention mask [b, 1, s, s] -> [b, 1, s / cp_size, s].
    """
    return {
        key: own_chunks(tensor, 2 if key == ATTENTION_MASK else 1, cp_rank, cp_size) for key, tensor in batch.items()
    }


def get_batch(
    data_iterator: Iterator[Mapping[str, Any]],
    device: torch.device,
    cp_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    """Take the next micro batch, move it to the device and cut it for context parallelism.

    Shapes: tokens, labels, position_ids int64 [b, s/cp], loss_mask float32 [b, s/cp], and, if the dataset ships it,
            attention_mask bool [b, 1, s/cp, s].
    Host:   from pinned memory the copies are asynchronous.
    """
    item = next(data_iterator)
    missing = [key for key in BATCH_KEYS if key not in item]
    assert not missing, f"the dataset's items lack {missing}; they have {sorted(item)}"
    keys = (*BATCH_KEYS, ATTENTION_MASK) if ATTENTION_MASK in item else BATCH_KEYS
    batch = {key: item[key].to(device, non_blocking=True) for key in keys}
    return slice_for_context_parallel(batch, group_rank(cp_group), group_size(cp_group))
