"""Size and rank of a process group that may be absent.

Everywhere in this tree `None` stands for a group that contains only the calling rank, so that modules work
without torch.distributed. Beware: torch itself reads `group=None` as the whole world, therefore consumers skip
the collective when `group_size(group) == 1`.
"""

import torch.distributed as dist


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Rank of the caller inside `group`; 0 for None."""
    return 0 if group is None else group.rank()
