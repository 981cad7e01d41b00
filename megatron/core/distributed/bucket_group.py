"""The parameters whose gradients travel in one collective, as a small state machine.

    COLLECTING --mark_ready*--> COLLECTING --start--> REDUCING --finish--> REDUCED --reset--> COLLECTING

`reset` is also allowed while collecting: an evaluation or an aborted step leaves the bucket there. An assertion guards
each transition. Who decides when a full bucket starts is the wrapper, which starts them in one fixed order.
"""

import enum

import torch
import torch.distributed as dist

from megatron.core.distributed.grad_scaling import GradReduction
from megatron.core.distributed.param_and_grad_buffer import get_main_grad
from megatron.core.utils.collectives import all_reduce
from megatron.core.utils.logging import get_rank


class BucketState(enum.Enum):
    """Where a bucket stands within a step."""

    COLLECTING = "collecting gradients"
    REDUCING = "being reduced"
    REDUCED = "reduced"


class BucketGroup:
    """One bucket: its parameters by name, its slice of the buffer and the way it is reduced."""

    def __init__(
        self,
        index: int,
        params: dict[str, torch.nn.Parameter],
        grad_data: torch.Tensor,
        reduction: GradReduction,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Take over `grad_data` [elements of the bucket], which the parameters' main_grad are views of."""
        self.index = index
        self.params = params
        self.grad_data = grad_data
        self.reduction = reduction
        self.group = group
        self.state = BucketState.COLLECTING
        self._names = {param: name for name, param in params.items()}
        self._ready: set[torch.nn.Parameter] = set()
        self._handle: dist.Work | None = None

    @property
    def is_full(self) -> bool:
        """True once every parameter is ready."""
        return len(self._ready) == len(self.params)

    def missing_names(self) -> list[str]:
        """Names of the parameters that are not ready."""
        return [name for name, param in self.params.items() if param not in self._ready]

    def mark_ready(self, param: torch.nn.Parameter) -> None:
        """Note that the gradient of `param` is complete for this step."""
        name = self._names[param]
        self._expect(BucketState.COLLECTING, f"parameter {name!r} was marked ready")
        assert param not in self._ready, (
            f"bucket {self.index}: parameter {name!r} was marked ready twice in one step; run all microbatches but the "
            "last under no_sync(), and call zero_grad_buffer() between steps"
        )
        self._ready.add(param)

    def start(self, async_op: bool) -> None:
        """Scale and launch the collective; with `async_op` it runs beside backward until `finish`."""
        self._expect(BucketState.COLLECTING, "its reduction was started")
        self.state = BucketState.REDUCING
        if self.reduction.factor != 1.0:
            self.grad_data.mul_(self.reduction.factor)
        self._handle = all_reduce(self.grad_data, self.group, self.reduction.op, async_op=async_op)

    def finish(self) -> None:
        """Wait for the collective; on an accelerator the current stream waits, not the host."""
        self._expect(BucketState.REDUCING, "its reduction was waited for")
        if self._handle is not None:
            self._handle.wait()
        self._handle = None
        self.state = BucketState.REDUCED

    def reset(self) -> None:
        """Forget the step; the gradients themselves are cleared with the whole buffer."""
        assert self.state is not BucketState.REDUCING, (
            f"bucket {self.index} was reset while {self.state.value}; call finish_grad_sync() first"
        )
        self._ready.clear()
        self.state = BucketState.COLLECTING

    def raise_if_not_finite(self) -> None:
        """Raise naming rank, bucket and parameters if a gradient is NaN or infinite; one host read."""
        if bool(torch.isfinite(torch.linalg.vector_norm(self.grad_data, ord=float("inf")))):
            return
        bad = [name for name, param in self.params.items() if not bool(get_main_grad(param).isfinite().all())]
        raise RuntimeError(
            f"rank {get_rank()}: check_for_nan_in_grad=True: NaN or infinity in the gradient of {', '.join(bad)} "
            f"(bucket {self.index}, before its reduction); look for the first bad loss, lower the learning rate, or "
            "let the run go on with --no-check-for-nan-in-loss-and-grad."
        )

    def _expect(self, state: BucketState, event: str) -> None:
        assert self.state is state, f"bucket {self.index}: {event} while {self.state.value}, expected {state.value}"
