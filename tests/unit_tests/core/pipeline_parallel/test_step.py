"""Scaling of losses and auxiliary losses, one process and two context parallel ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import aux_loss_scale
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.step import StepContext, forward_step, output_gradient
from megatron.core.process_groups_config import ProcessGroupCollection


@pytest.fixture(autouse=True)
def fresh_aux_scale():
    yield
    aux_loss_scale.reset()


class Model(torch.nn.Module):
    """Loss sum 6 * weight; an auxiliary loss 1 * aux rides on it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.aux = torch.nn.Parameter(torch.ones(()))

    def forward(self):
        return aux_loss_scale.attach(6.0 * self.weight, 1.0 * self.aux)


def run_backward(context):
    loss = forward_step(context, chunk=0)
    torch.autograd.backward(loss, output_gradient(context, loss, None))


def gradients(returned, num_microbatches=2, cp_group=None, **config_fields):
    """Gradients of weight and aux, and the token count, of one microbatch; `returned` makes loss_func's result."""
    model = Model()
    context = StepContext(
        forward_step_func=lambda iterator, model: (model(), returned),
        data_iterators=[None],
        chunks=[model],
        config=ModelParallelConfig(**config_fields),
        num_microbatches=num_microbatches,
        pg_collection=ProcessGroupCollection(cp=cp_group),
    )
    run_backward(context)
    tokens = None if context.num_tokens is None else context.num_tokens.item()
    return model.weight.grad.item(), model.aux.grad.item(), tokens


def with_tokens(num_tokens):
    return lambda output: (output, torch.tensor(num_tokens), {})


def four_times(value):
    return value * 4.0


def test_default_divides_by_tokens_and_microbatches():
    assert gradients(with_tokens(3)) == (1.0, 0.5, 3)


def test_fully_masked_microbatch_divides_by_one():
    assert gradients(with_tokens(0)) == (3.0, 0.5, 0)


def test_per_token_loss_is_left_undivided():
    assert gradients(with_tokens(3), calculate_per_token_loss=True) == (6.0, 1.0, 3)


def test_averaged_loss_is_divided_by_microbatches_only():
    assert gradients(lambda output: (output, {})) == (3.0, 0.5, None)


def test_loss_scale_multiplies_loss_and_auxiliary_loss():
    assert gradients(with_tokens(3), grad_scale_func=four_times) == (4.0, 2.0, 3)
    per_token = gradients(with_tokens(3), grad_scale_func=four_times, calculate_per_token_loss=True)
    assert per_token == (24.0, 4.0, 3)


def gradients_over_cp(per_token):
    """1 token on rank 0 and 2 on rank 1."""
    tokens = 1 + dist.get_rank()
    return gradients(with_tokens(tokens), cp_group=dist.group.WORLD, calculate_per_token_loss=per_token)


def test_token_counts_are_summed_over_context_ranks(pool):
    assert pool.run(gradients_over_cp, False, world_size=2) == [(2.0, 1.0, 1), (2.0, 1.0, 2)]
    assert pool.run(gradients_over_cp, True, world_size=2) == [(6.0, 1.0, 1), (6.0, 1.0, 2)]
