"""The step of `overlapped_model` as a graph: captured on a GPU, repeated under watch by the stand-in on a CPU.

step = CapturedStep(model, lengths, delays_wgrad=True)
grads = step.run(seed)                          {name: gradient} of a replay with the batches of that seed
step.destroy()
grads = plain_gradients(model, lengths, seed)   those of an eager step without overlap

Faults and delays must be in place when the step is made: a replay repeats what was captured.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from megatron.core.full_iteration_graph import CudaRecording, FullIterationGraph, GraphPool
from megatron.core.full_iteration_graph.checks import CheckedRecording
from megatron.core.models.gpt import GPTModel
from megatron.core.step_guard import StepGuard, guarding
from tests.common.overlapped_model import make_batches, run_step


class CapturedStep:
    """A graph of forward and backward over microbatches of `lengths` tokens."""

    def __init__(
        self, model: GPTModel, lengths: Sequence[int], overlap: bool = True, delays_wgrad: bool = False
    ) -> None:
        """Run the step once eagerly, as a first step of its stream, and capture it."""
        self.model, self.lengths = model, list(lengths)
        device = next(model.parameters()).device
        self.pool = GraphPool(device) if device.type == "cuda" else None
        guard = StepGuard(device)
        with nullcontext() if self.pool is None else self.pool.allocating(), guarding(guard):
            run_step(model, make_batches(lengths, device), overlap, delays_wgrad)
        model.zero_grad()

        def body(batches):
            with guarding(guard):
                run_step(model, batches, overlap, delays_wgrad)
            return next(model.parameters()).grad.flatten()[:1]

        recording = CheckedRecording() if self.pool is None else CudaRecording(self.pool, [])
        self.graph = FullIterationGraph("step", body, make_batches(lengths), recording=recording, device=device)
        self.graph.capture()

    def run(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Replay with the batches of `seed`; copies of the gradients."""
        self.graph.run(make_batches(self.lengths, seed=seed))
        return _gradients(self.model)

    def destroy(self) -> None:
        """Drop the graph and the gradients in its memory."""
        self.graph.destroy()
        self.model.zero_grad()


def plain_gradients(model: GPTModel, lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Copies of the gradients of an eager step without overlap, by the kernels of a captured one."""
    device = next(model.parameters()).device
    with guarding(StepGuard(device)):
        run_step(model, make_batches(lengths, device, seed), overlap=False)
    return _gradients(model)


def _gradients(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters()}
