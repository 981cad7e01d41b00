"""One short fingerprint of everything that training changes (--log-state-hash).

Weights, reduced main gradients, persistent buffers (expert bias) and optimizer state are hashed byte by byte, each
under its global name, and the hashes are combined in the order of the names. So the result does not depend on how
buffers are cut into buckets, on which rank holds an expert, or on whether the optimizer is sharded; equal bits give
equal hashes, and one changed bit on one replica gives another hash.

Cost: every tensor is copied to the host, and one object gather over all ranks per call; states of a sharded optimizer
are gathered, a bucket of one kind at a time.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron.core.module_api.global_names import named_global_buffers
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils.collectives import all_gather_object, world_group

DIGEST_BYTES = 8


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hash dtype, shape and bytes of a tensor [any]."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.blake2b(head + data, digest_size=DIGEST_BYTES).hexdigest()


def named_state(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (global name and kind, tensor [any]) of everything that counts on this rank."""
    for state in optimizer.whole_state():
        yield f"{state.name} weight", state.param
        for key, tensor in state.tensors.items():
            yield f"{state.name} {key}", tensor
    for chunk in model:
        for name, buffer in named_global_buffers(chunk):
            yield f"{name} buffer", buffer


def combine(digests_by_rank: Sequence[Mapping[str, str]]) -> str:
    """Combine the digests of all ranks: per name the different digests, names and digests in sorted order."""
    union: dict[str, set[str]] = {}
    for digests in digests_by_rank:
        for name, digest in digests.items():
            union.setdefault(name, set()).add(digest)
    text = "\n".join(f"{name} {' '.join(sorted(union[name]))}" for name in sorted(union))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def state_hash(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> str:
    """Sixteen hex digits that stand for the training state of all ranks; every rank must call it."""
    local = {name: tensor_digest(tensor) for name, tensor in named_state(model, optimizer)}
    return combine(all_gather_object(local, world_group()))
