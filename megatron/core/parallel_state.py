"""Upstream's process group getters as a thin view over one `ProcessGroupCollection`.

Code of this tree takes a collection as an argument; the getters are for scripts that follow upstream.
`initialize_model_parallel` is the only function here that communicates.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_generator import DEFAULT_ORDER, ParallelSizes, plan_groups


@dataclass
class _ParallelState:
    """What the getters read: the groups of this rank and the global ranks inside each."""

    sizes: ParallelSizes | None = None
    groups: ProcessGroupCollection = field(default_factory=ProcessGroupCollection)
    ranks: dict[str, list[int]] = field(default_factory=dict)
    num_chunks: int | None = None
    """Model chunks of each pipeline rank; None without interleaving."""


_STATE = _ParallelState()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    order: str = DEFAULT_ORDER,
    distributed_timeout_minutes: float = 30,
) -> None:
    """Create all process groups; every rank of the default group must call this with equal arguments.

    Sizes that do not fit are refused before the first group is made. Each group of several ranks, whatever its role,
    has its own communicator, so that roles with the same ranks can communicate at the same time; all have the timeout.
    """
    global _STATE
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first.")
    if _STATE.sizes is not None:
        raise RuntimeError(
            f"model parallel groups exist already ({_STATE.sizes}); call destroy_model_parallel before a second setup."
        )
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size < 2:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size} with "
            f"pipeline_model_parallel_size={pipeline_model_parallel_size}: chunks interleave over at least 2 stages; "
            "raise the pipeline size or drop the virtual size."
        )
    sizes = ParallelSizes(
        world_size=dist.get_world_size(),
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        pp=pipeline_model_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
    )
    state = _ParallelState(sizes=sizes, num_chunks=virtual_pipeline_model_parallel_size)
    timeout = timedelta(minutes=distributed_timeout_minutes)
    # Roles in which this rank is alone share one group: nothing is ever sent in it, and made one by one they would be
    # 8 * world_size collective calls.
    alone = [dist.get_rank()]
    alone_group = dist.new_group(alone, timeout=timeout, use_local_synchronization=True, group_desc="alone")
    for role, rank_lists in plan_groups(sizes).items():
        for ranks in rank_lists:
            group = alone_group
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=timeout, group_desc=role)
            if alone[0] in ranks:
                setattr(state.groups, role, group)
                state.ranks[role] = ranks
    _STATE = state


def destroy_model_parallel() -> None:
    """Destroy every group made by `initialize_model_parallel` and forget them; the default group stays."""
    global _STATE
    state, _STATE = _STATE, _ParallelState()
    if dist.is_initialized():
        for group in dict.fromkeys(getattr(state.groups, role) for role in state.ranks):
            dist.destroy_process_group(group)


def reset() -> None:
    """Forget all groups without touching them, for when the default group is gone already."""
    global _STATE
    _STATE = _ParallelState()


def is_initialized() -> bool:
    """True between `initialize_model_parallel` and `destroy_model_parallel`."""
    return _STATE.sizes is not None


model_parallel_is_initialized = is_initialized


def get_process_group_collection() -> ProcessGroupCollection:
    """The groups of this rank; all None while not initialised."""
    return _STATE.groups


def _group(role: str) -> dist.ProcessGroup:
    group = getattr(_STATE.groups, role)
    if group is None:
        why = "this rank is not part of it" if is_initialized() else "call initialize_model_parallel first"
        raise RuntimeError(f"no {role!r} process group: {why}.")
    return group


def _group_ranks(role: str) -> list[int]:
    _group(role)
    return _STATE.ranks[role]


# Tensor parallel.


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The tensor parallel group."""
    return _group("tp")


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor parallel group."""
    return _group("tp").size()


def get_tensor_model_parallel_rank() -> int:
    """Rank in the tensor parallel group."""
    return _group("tp").rank()


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the tensor parallel group."""
    return _group_ranks("tp")[0]


def get_model_parallel_group() -> dist.ProcessGroup:
    """Tensor and pipeline parallel ranks of one dense replica."""
    return _group("mp")


# Pipeline parallel.


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """The pipeline parallel group."""
    return _group("pp")


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _group("pp").size()


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    return _group("pp").rank()


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Model chunks of each pipeline rank, None without interleaving."""
    return _STATE.num_chunks


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True on the first pipeline rank; with `ignore_virtual` False only if `vp_stage` is its first chunk."""
    is_first_chunk = ignore_virtual or _chunk(vp_stage) == 0
    return is_first_chunk and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True on the last pipeline rank; with `ignore_virtual` False only if `vp_stage` is its last chunk."""
    is_last_chunk = ignore_virtual or _chunk(vp_stage) == (_STATE.num_chunks or 1) - 1
    return is_last_chunk and get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _chunk(vp_stage: int | None) -> int:
    """The chunk that is asked about; without interleaving there is one."""
    if _STATE.num_chunks is None:
        return 0
    if vp_stage is None:
        raise ValueError(f"vp_stage=None: each rank has {_STATE.num_chunks} chunks, say which one is meant.")
    return vp_stage


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage of this pipeline."""
    return _group_ranks("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage of this pipeline."""
    return _group_ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage, the first one after the last."""
    ranks = _group_ranks("pp")
    return ranks[(get_pipeline_model_parallel_rank() + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage, the last one before the first."""
    return _group_ranks("pp")[get_pipeline_model_parallel_rank() - 1]


def get_embedding_group() -> dist.ProcessGroup:
    """First and last stage, which share the word embedding when it is tied."""
    return _group("embd")


def get_position_embedding_group() -> dist.ProcessGroup:
    """The stage that holds the position embedding."""
    return _group("pos_embd")


def is_rank_in_embedding_group() -> bool:
    """True on the first and last stage."""
    return _STATE.groups.embd is not None


def is_rank_in_position_embedding_group() -> bool:
    """True on the first stage."""
    return _STATE.groups.pos_embd is not None


# Data and context parallel.


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The data parallel group, optionally with the context parallel ranks."""
    return _group("dp_cp" if with_context_parallel else "dp")


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Size of the data parallel group."""
    return get_data_parallel_group(with_context_parallel).size()


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Rank in the data parallel group."""
    return get_data_parallel_group(with_context_parallel).rank()


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of the data parallel group."""
    return _group_ranks("dp_cp" if with_context_parallel else "dp")[0]


def get_context_parallel_group() -> dist.ProcessGroup:
    """The context parallel group."""
    return _group("cp")


def get_context_parallel_world_size() -> int:
    """Size of the context parallel group."""
    return _group("cp").size()


def get_context_parallel_rank() -> int:
    """Rank in the context parallel group."""
    return _group("cp").rank()


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the context parallel group."""
    return list(_group_ranks("cp"))


def get_tensor_and_context_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the tokens of one sample."""
    return _group("tp_cp")


def get_tensor_and_data_parallel_group(with_context_parallel: bool = True) -> dist.ProcessGroup:
    """All ranks of one pipeline stage; upstream's variant without context parallelism exists for CP 1 only."""
    if not with_context_parallel and get_context_parallel_world_size() > 1:
        raise ConfigError(
            f"with_context_parallel=False with context_parallel_size={get_context_parallel_world_size()}: no such "
            "group is kept; pass with_context_parallel=True."
        )
    return _group("tp_dp_cp")


# Experts.


def get_expert_model_parallel_group() -> dist.ProcessGroup:
    """The expert parallel group."""
    return _group("ep")


def get_expert_model_parallel_world_size() -> int:
    """Size of the expert parallel group."""
    return _group("ep").size()


def get_expert_model_parallel_rank() -> int:
    """Rank in the expert parallel group."""
    return _group("ep").rank()


def get_expert_tensor_parallel_group() -> dist.ProcessGroup:
    """The expert tensor parallel group."""
    return _group("expt_tp")


def get_expert_tensor_parallel_world_size() -> int:
    """Size of the expert tensor parallel group."""
    return _group("expt_tp").size()


def get_expert_tensor_parallel_rank() -> int:
    """Rank in the expert tensor parallel group."""
    return _group("expt_tp").rank()


def get_expert_tensor_and_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that together hold all experts of a layer."""
    return _group("tp_ep")


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Number of ranks that together hold all experts of a layer."""
    return _group("tp_ep").size()


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Rank among those that together hold all experts of a layer."""
    return _group("tp_ep").rank()


def get_expert_tensor_model_pipeline_parallel_group() -> dist.ProcessGroup:
    """The ranks that together hold all experts of the model."""
    return _group("tp_ep_pp")


def get_expert_data_parallel_group() -> dist.ProcessGroup:
    """The replicas of an expert."""
    return _group("expt_dp")


def get_expert_data_parallel_world_size() -> int:
    """Number of replicas of an expert."""
    return _group("expt_dp").size()


def get_expert_data_parallel_rank() -> int:
    """Rank among the replicas of an expert."""
    return _group("expt_dp").rank()
