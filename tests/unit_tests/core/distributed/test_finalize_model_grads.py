"""Order and effect of gradient finalisation."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from tests.common.collective_log import CollectiveLog


class Counter(torch.nn.Module):
    """Counts given numbers in each step and keeps what the finaliser hands back."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.received = None

    def step_counts(self):
        return None if self.counts is None else torch.tensor(self.counts)

    def apply_step_counts(self, summed):
        self.received = summed.tolist()


class Model(torch.nn.Module):
    """A weight and three counters, of which the second counts nothing."""

    def __init__(self, factor):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.counters = torch.nn.ModuleList([Counter([factor, 0, 2]), Counter(None), Counter([7 * factor])])

    def forward(self):
        return self.weight.sum()


def finalize(num_tokens):
    if dist.is_initialized():
        parallel_state.initialize_model_parallel()
    rank = dist.get_rank() if dist.is_initialized() else 0
    config = ModelParallelConfig(calculate_per_token_loss=num_tokens is not None)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Model(1 + 10 * rank))
    model().backward()
    tokens = None if num_tokens is None else torch.tensor(num_tokens[rank])
    with CollectiveLog() as log:
        finalize_model_grads([model], tokens)
    received = [counter.received for counter in model.module.counters]
    return model.module.weight.main_grad.tolist(), received, [(r.op, r.role, r.dtype) for r in log.records]


def test_counts_of_all_modules_are_summed_in_one_all_reduce(pool):
    for grads, received, records in pool.run(finalize, None, world_size=2):
        assert grads == [1.0, 1.0]
        assert received == [[12, 0, 4], None, [84]]
        assert records == [("allreduce_", "dp_cp", "float32"), ("allreduce_", "tp_dp_cp", "int64")]


def test_per_token_loss_divides_by_the_global_count(pool):
    for grads, _, _ in pool.run(finalize, [3, 5], world_size=2):
        assert grads == [0.25, 0.25]


def test_no_unmasked_token_divides_by_one():
    assert finalize([0])[0] == [1.0, 1.0]


def test_scaling_before_the_reduction_is_refused():
    model = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(), Model(1))
    with pytest.raises(AssertionError, match="scaled while collecting gradients"):
        model.scale_gradients(0.5)
