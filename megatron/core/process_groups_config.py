"""The process groups of one rank as a value that is passed to the parts that need it."""

from dataclasses import dataclass, fields

import torch.distributed as dist


@dataclass
class ProcessGroupCollection:
    """The groups this rank belongs to, under upstream's names. None means a group of this rank alone."""

    tp: dist.ProcessGroup | None = None
    """Tensor parallel."""
    pp: dist.ProcessGroup | None = None
    """Pipeline parallel."""
    mp: dist.ProcessGroup | None = None
    """Tensor and pipeline parallel: the ranks that together hold the dense layers."""
    embd: dist.ProcessGroup | None = None
    """First and last pipeline stage; None on the stages between."""
    pos_embd: dist.ProcessGroup | None = None
    """First pipeline stage; None on the others."""
    cp: dist.ProcessGroup | None = None
    """Context parallel."""
    tp_cp: dist.ProcessGroup | None = None
    """Tensor and context parallel: the ranks that hold the tokens of one sample."""
    dp: dist.ProcessGroup | None = None
    """Data parallel, context parallel ranks not included."""
    dp_cp: dist.ProcessGroup | None = None
    """Data and context parallel: the replicas of a dense parameter."""
    tp_dp_cp: dist.ProcessGroup | None = None
    """Tensor, data and context parallel: all ranks of a pipeline stage."""
    ep: dist.ProcessGroup | None = None
    """Expert parallel."""
    expt_tp: dist.ProcessGroup | None = None
    """Expert tensor parallel."""
    tp_ep: dist.ProcessGroup | None = None
    """Expert tensor and expert parallel: the ranks that together hold all experts of a layer."""
    tp_ep_pp: dist.ProcessGroup | None = None
    """Expert tensor, expert and pipeline parallel: the ranks that together hold all experts of the model."""
    expt_dp: dist.ProcessGroup | None = None
    """Expert data parallel: the replicas of an expert."""
    world: dist.ProcessGroup | None = None
    """All ranks."""

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Every group of more than this rank, once, in one order on all ranks."""
        groups = (getattr(self, f.name) for f in fields(self))
        return list(dict.fromkeys(group for group in groups if group is not None))

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: list[str] | None = None) -> "ProcessGroupCollection":
        """The groups held by `parallel_state`; all None while that is not initialised.

        `required_pgs` limits the result to the named attributes, the others stay None.
        """
        from megatron.core import parallel_state

        current = parallel_state.get_process_group_collection()
        if required_pgs is None:
            return current
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(required_pgs) - set(known))
        if unknown:
            raise ValueError(f"required_pgs={unknown}: no such process group; known are {', '.join(known)}.")
        return cls(**{name: getattr(current, name) for name in required_pgs})
