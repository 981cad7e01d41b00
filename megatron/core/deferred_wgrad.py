"""Where the weight gradient of a linear layer goes, and when: within backward, or later from a queue.

    with deferring(queue):        the forward pass of one stage and microbatch
        ...                       each linear layer notes the queue
    backward                      input gradients; the layers put their weight gradients into the queue
    queue.flush()                 weight gradients, on the stream that is current now, in the order of backward

A product finds its queue in its autograd context, never on a module, so that microbatches in flight cannot mix. The
result is added to `param.main_grad` if there is one (gradient accumulation fusion), else to `param.grad`.

A parameter tells the owner of its gradient buffer that it is complete through its `GradientReport`. Autograd's hook on
the parameter fires during backward even if no gradient came; it stays silent while weight gradients of the parameter
wait in a queue, and `flush` reports after the last of them.

A queue keeps the operands of its products alive: output gradients, and inputs that autograd would drop after backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.core import streams

_REPORT_NAME = "gradient_report"


@dataclass
class GradientReport:
    """How one parameter reports its gradient."""

    on_ready: Callable[[torch.nn.Parameter], object]
    """Called when `main_grad` is complete for the microbatch."""

    num_deferred: int = 0
    """Weight gradients of the parameter that wait in queues."""


def set_gradient_report(param: torch.nn.Parameter, on_ready: Callable[[torch.nn.Parameter], object]) -> None:
    """Let `param` [any] report to `on_ready`; the owner of its gradient buffer calls this once."""
    setattr(param, _REPORT_NAME, GradientReport(on_ready))


def _report_of(param: torch.Tensor) -> GradientReport | None:
    return getattr(param, _REPORT_NAME, None)


def is_wgrad_deferred(param: torch.nn.Parameter) -> bool:
    """True while a weight gradient of `param` [any] waits in a queue."""
    report = _report_of(param)
    return report is not None and report.num_deferred > 0


def forget_deferred(param: torch.nn.Parameter) -> None:
    """Drop the count of waiting weight gradients of `param` [any], at the start of a step: an aborted one left it."""
    report = _report_of(param)
    if report is not None:
        report.num_deferred = 0


class WgradQueue:
    """Weight gradients of one stage and one microbatch, first in, first out."""

    def __init__(self) -> None:
        self.num_computed = 0
        """Products run so far."""
        self._waiting: list[tuple[tuple[torch.nn.Parameter, ...], Callable[[], None]]] = []

    def __len__(self) -> int:
        """Products that wait."""
        return len(self._waiting)

    def put(self, params: Sequence[torch.nn.Parameter], compute: Callable[[], None]) -> None:
        """Note that `compute` will add to the gradients of `params`."""
        for param in params:
            report = _report_of(param)
            if report is not None:
                report.num_deferred += 1
        self._waiting.append((tuple(params), compute))
        streams.put_off(compute)

    def flush(self) -> None:
        """Run what waits, in order, on the current stream; report each parameter after its last product."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:
            params, compute = waiting.pop()  # operands are freed one product after the other
            streams.take_up(compute)
            compute()
            self.num_computed += 1
            for param in params:
                report = _report_of(param)
                if report is not None:
                    report.num_deferred -= 1
                    if report.num_deferred == 0:
                        report.on_ready(param)


_ACTIVE: ContextVar[WgradQueue | None] = ContextVar("active_wgrad_queue", default=None)


def active_queue() -> WgradQueue | None:
    """Queue of the forward pass that is running; None computes weight gradients within backward."""
    return _ACTIVE.get()


@contextmanager
def deferring(queue: WgradQueue | None) -> Iterator[None]:
    """Make `queue` the active one of this thread; None ends deferring inside the block."""
    token = _ACTIVE.set(queue)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class WeightGradient(Protocol):
    """A product that is the gradient of one weight, or of n weights of one shape."""

    def compute(self) -> Sequence[torch.Tensor]:
        """Gradients n x [out, in] in the dtype of the operands."""
        ...

    def add_to(self, main_grads: Sequence[torch.Tensor]) -> None:
        """Add to main gradients n x [out, in], without rounding in between."""
        ...


class WgradSink:
    """Takes the weight gradients of one call of a linear layer; made in forward, used in backward.

    Args:
        weights: The call's weights [out, in]. One that is not a leaf of autograd (a cast, say) is never deferred.
        is_fused: Add to main gradients inside the product where there are any.
    """

    def __init__(self, weights: Sequence[torch.Tensor], is_fused: bool) -> None:
        self._params = [weight for weight in weights if isinstance(weight, torch.nn.Parameter)]
        self._is_plain = len(self._params) < len(weights)
        self._is_fused = is_fused
        self._queue = active_queue()

    def take(self, product: WeightGradient) -> Sequence[torch.Tensor | None]:
        """Gradients for autograd; None for each weight whose gradient is written here, now or later."""
        if self._is_plain:
            return product.compute()
        if self._queue is not None:
            self._queue.put([param for param in self._params if param.requires_grad], lambda: self._write(product))
        elif not self._add_to_main_grads(product):
            return product.compute()
        return [None] * len(self._params)

    def _add_to_main_grads(self, product: WeightGradient) -> bool:
        """Add inside the product if all weights have main gradients."""
        main_grads = [getattr(param, "main_grad", None) for param in self._params]
        if not self._is_fused or any(grad is None for grad in main_grads):
            return False
        product.add_to([grad for grad in main_grads if grad is not None])
        return True

    def _write(self, product: WeightGradient) -> None:
        """Compute a deferred gradient and add it."""
        with torch.no_grad():
            if self._add_to_main_grads(product):
                return
            for param, grad in zip(self._params, product.compute(), strict=True):
                if param.requires_grad:
                    _add_gradient(param, grad)


def _add_gradient(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Add grad [any] as autograd and the hook of a gradient buffer would."""
    main_grad = getattr(param, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(grad)
    elif param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
