"""From the loader's dictionary to the tensors one rank works on.

Keys are taken by name, so a dataset may add fields in any order. Legend: b micro batch, s sequence length.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.core.utils.groups import group_rank, group_size

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
"""What the model and the loss read; each is [b, s]."""

ATTENTION_MASK = "attention_mask"
"""Key of the mask [b, 1, s, s] of a loader that hides earlier documents."""


def slice_for_context_parallel(
    batch: Mapping[str, torch.Tensor], cp_rank: int, cp_size: int
) -> dict[str, torch.Tensor]:
    """Keep the part of every sequence that belongs to one context-parallel rank.

    The sequence is cut in 2 * cp_size equal chunks and rank c keeps chunks c and 2 * cp_size - 1 - c, so that under a
    causal mask all ranks have the same work.

    Shapes: [b, s] -> [b, s / cp_size] for every entry; a size of 1 returns the entries as they are.
    """
    if cp_size == 1:
        return dict(batch)
    kept: dict[str, torch.Tensor] = {}
    for key, tensor in batch.items():
        b, s = tensor.shape[:2]
        assert s % (2 * cp_size) == 0, f"{key}: length {s} cannot be cut in {2 * cp_size} equal chunks"
        chunks = tensor.view(b, 2 * cp_size, s // (2 * cp_size))
        pair = torch.tensor([cp_rank, 2 * cp_size - 1 - cp_rank], device=tensor.device)
        kept[key] = chunks.index_select(1, pair).reshape(b, s // cp_size)
    return kept


def get_batch(
    data_iterator: Iterator[Mapping[str, Any]],
    device: torch.device,
    cp_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    """Take the next micro batch, move it to the device and cut it for context parallelism.

    Shapes: tokens, labels, position_ids int64 [b, s/cp], loss_mask float32 [b, s/cp], and, if the dataset ships it,
            attention_mask bool [b, 1, s, s], which no context-parallel rank has a part of.
    Host:   from pinned memory the copies are asynchronous.
    """
    item = next(data_iterator)
    missing = [key for key in BATCH_KEYS if key not in item]
    assert not missing, f"the dataset's items lack {missing}; they have {sorted(item)}"
    batch = {key: item[key].to(device, non_blocking=True) for key in BATCH_KEYS}
    batch = slice_for_context_parallel(batch, group_rank(cp_group), group_size(cp_group))
    if ATTENTION_MASK in item:
        assert group_size(cp_group) == 1, "attention masks are not cut for context parallelism"
        batch[ATTENTION_MASK] = item[ATTENTION_MASK].to(device, non_blocking=True)
    return batch
