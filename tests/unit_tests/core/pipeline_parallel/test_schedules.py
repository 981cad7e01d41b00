"""The entry function: upstream's call, what it returns, what it finalises."""

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.common.collective_log import CollectiveLog


class Linear(torch.nn.Module):
    """weight * x for a batch x [n]."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.spare = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return self.weight * x + self.spare.sum()


def forward_step(iterator, model):
    batch = next(iterator)

    def loss_func(output, non_loss_data=False):
        if non_loss_data:
            return output.tolist()
        total = output.sum()
        return (
            total,
            torch.tensor(batch.numel()),
            {"lm loss": torch.stack([total.detach(), total.new_tensor(batch.numel())])},
        )

    return model(batch), loss_func


def make_model(per_token=False, **ddp_fields):
    config = ModelParallelConfig(calculate_per_token_loss=per_token, finalize_model_grads_func=finalize_model_grads)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**ddp_fields), Linear())


def run(model, batches, **arguments):
    data = iter([torch.tensor(batch, dtype=torch.float64) for batch in batches])
    call = {"seq_length": 4, "micro_batch_size": 1, "decoder_seq_length": 4, "forward_only": False, **arguments}
    return get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data, model=[model], num_microbatches=len(batches), **call
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_default_loss_is_the_mean_of_microbatch_means(overlap):
    model = make_model(overlap_grad_reduce=overlap)
    reports = run(model, [[1.0, 3.0], [5.0]])
    assert model.module.weight.main_grad.item() == 3.5
    assert [report["lm loss"].tolist() for report in reports] == [[8.0, 2.0], [10.0, 1.0]]


def test_per_token_loss_is_the_mean_over_all_tokens():
    model = make_model(per_token=True)
    run(model, [[1.0, 3.0], [5.0]])
    assert model.module.weight.main_grad.item() == 3.0


def test_forward_only_leaves_no_gradient():
    model = make_model(overlap_grad_reduce=True)
    with CollectiveLog() as log:
        reports = run(model, [[1.0], [2.0]], forward_only=True)
    assert [report["lm loss"][0].item() for report in reports] == [2.0, 4.0]
    assert model.module.weight.main_grad.item() == 0.0
    assert log.records == []


def test_forward_only_builds_no_graph():
    def output_requires_grad(iterator, model):
        return model(next(iterator)), lambda output: (output.sum(), output.requires_grad)

    reports = get_forward_backward_func()(
        forward_step_func=output_requires_grad,
        data_iterator=iter([torch.ones(1).double()]),
        model=make_model(),
        num_microbatches=1,
        forward_only=True,
    )
    assert reports == [False]


def test_other_outputs_can_be_collected_instead_of_losses():
    assert run(make_model(), [[1.0, 3.0]], forward_only=True, collect_non_loss_data=True) == [[2.0, 6.0]]


def test_several_steps_start_from_cleared_buffers():
    model = make_model(overlap_grad_reduce=True)
    for _ in range(3):
        model.zero_grad_buffer()
        run(model, [[1.0, 3.0], [5.0]])
    assert model.module.weight.main_grad.item() == 3.5


def test_per_token_loss_needs_a_token_count():
    model = make_model(per_token=True)
    with pytest.raises(ConfigError, match="calculate_per_token_loss=True with a loss function that returns 2 values"):
        get_forward_backward_func()(
            forward_step_func=lambda iterator, model: (model(torch.ones(1).double()), lambda out: (out.sum(), {})),
            data_iterator=None,
            model=model,
            num_microbatches=1,
        )


def test_several_chunks_without_a_schedule_are_refused():
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size=1 with 2 model chunks"):
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=None, model=[make_model(), make_model()], num_microbatches=1
        )


def test_no_microbatches_are_refused():
    with pytest.raises(ConfigError, match="num_microbatches=0: a step has at least one"):
        run(make_model(), [])


def test_messages_between_stages_cannot_be_adjusted():
    with pytest.raises(ConfigError, match=r"adjust_tensor_shapes_fn=<.*: all messages between stages are alike"):
        run(make_model(), [[1.0]], adjust_tensor_shapes_fn=len)
