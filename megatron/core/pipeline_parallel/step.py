"""Forward and backward of one microbatch, and how its loss is scaled.

Let L be the sum of masked token losses of a microbatch on this rank, N its number of unmasked tokens, M the number of
microbatches, CP the context parallel size. Backward starts from

    default           L / max(sum of N over CP, 1) * CP / M     gradients are averaged over DP * CP afterwards
    per-token loss    L                                         gradients are divided by the global N afterwards

times the loss scale. An auxiliary loss enters backward with loss_scale * CP / M, for a per-token loss with loss_scale.
A loss function that returns no N has averaged its loss already; it is only multiplied by CP / M.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.aux_loss_scale import set_aux_loss_scale
from megatron.core.configs.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.actions import PlanShape
from megatron.core.pipeline_parallel.p2p import MessageFormat
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import all_reduce
from megatron.core.utils.groups import group_size
from megatron.core.utils.unwrap import unwrap_model

LossFunc = Callable[..., Any]
ForwardStepFunc = Callable[..., tuple[torch.Tensor, LossFunc]]


@dataclass
class StepContext:
    """What is the same for all microbatches of a step, and what they leave behind."""

    forward_step_func: ForwardStepFunc
    data_iterators: Sequence[Any]
    chunks: Sequence[torch.nn.Module]
    config: ModelParallelConfig
    num_microbatches: int
    pg_collection: ProcessGroupCollection
    shape: PlanShape = field(default_factory=lambda: PlanShape(num_microbatches=1))
    """Says which stages the chunks are."""
    message_format: MessageFormat | None = None
    """None if there is one stage."""
    collect_non_loss_data: bool = False
    reduced: list[Any] = field(default_factory=list)
    """What the loss function reported, one entry for each microbatch."""
    num_tokens: torch.Tensor | None = None
    """Unmasked tokens of this rank so far []; None if the loss function does not count them."""

    def is_first(self, chunk: int) -> bool:
        """True if `chunk` begins with the embedding and receives nothing."""
        return self.shape.pp_size == 1 or self.shape.stage(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """True if `chunk` ends with the loss."""
        return self.shape.pp_size == 1 or self.shape.stage(chunk) == self.shape.num_stages - 1


def forward_step(context: StepContext, chunk: int, received: torch.Tensor | None = None) -> torch.Tensor:
    """Run one microbatch through `chunk`; returns its output [s, b, h], or in the last stage the loss [].

    `received` [s, b, h] is the output of the stage before. The loss is what backward starts from, before loss scaling.
    With `collect_non_loss_data` nothing is reduced: the model's output goes to the loss function with
    `non_loss_data=True`, and what that returns is collected.
    """
    model = context.chunks[chunk]
    if received is not None:
        unwrap_model(model).set_input_tensor([received])
    output, loss_func = context.forward_step_func(context.data_iterators[chunk], model)
    return microbatch_loss(context, output, loss_func) if context.is_last(chunk) else output


def microbatch_loss(context: StepContext, output: torch.Tensor, loss_func: LossFunc) -> torch.Tensor:
    """Apply the loss function to the model's output [...], note its report; returns the loss [] of `forward_step`."""
    if context.collect_non_loss_data:
        context.reduced.append(loss_func(output, non_loss_data=True))
        return output
    returned = loss_func(output)
    if len(returned) == 3:
        loss_sum, num_tokens, report = returned
        loss = _normalise(context, loss_sum, num_tokens)
    else:
        mean_loss, report = returned
        loss = mean_loss * group_size(context.pg_collection.cp) / context.num_microbatches
    context.reduced.append(report)
    return loss


def _normalise(context: StepContext, loss_sum: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Count the tokens and divide `loss_sum` [] as the table above says."""
    num_tokens = num_tokens.detach()
    context.num_tokens = num_tokens.clone() if context.num_tokens is None else context.num_tokens + num_tokens
    if context.config.calculate_per_token_loss:
        return loss_sum
    cp_group = context.pg_collection.cp
    divisor = num_tokens.clone()
    all_reduce(divisor, cp_group)
    return loss_sum / divisor.clamp(min=1) * group_size(cp_group) / context.num_microbatches


def output_gradient(context: StepContext, loss: torch.Tensor | None, received: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient that the backward of a chunk starts from; auxiliary losses follow in proportion.

    The last stage starts from its loss [] with the loss scale; others from what they `received` [s, b, h].
    """
    if received is not None:
        set_aux_loss_scale(_aux_loss_scale(context, received))
        return received
    assert loss is not None, "backward without a loss and without a received gradient"
    set_aux_loss_scale(_aux_loss_scale(context, loss))
    grad = torch.ones_like(loss)
    return grad if context.config.grad_scale_func is None else context.config.grad_scale_func(grad)


def _aux_loss_scale(context: StepContext, like: torch.Tensor) -> torch.Tensor:
    """Scalar factor of auxiliary losses in backward, fp32 or wider; `like` [any] gives dtype and device."""
    scale = torch.ones((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    if context.config.grad_scale_func is not None:
        scale = context.config.grad_scale_func(scale)
    if context.config.calculate_per_token_loss:
        return scale
    return scale * group_size(context.pg_collection.cp) / context.num_microbatches
