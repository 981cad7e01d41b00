"""Deferred weight gradients: same bits as within backward, and each parameter is reported once, after its product."""

import pytest
import torch

from megatron.core.configs.parallel import ModelParallelConfig
from megatron.core.deferred_wgrad import WgradQueue, deferring
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    distributed_data_parallel,
)
from megatron.core.fusions.fused_grouped_linear import grouped_linear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.linear_autograd import column_parallel_linear, row_parallel_linear
from tests.common.moe_layers import normal
from tests.common.mutants import replaced


class Model(torch.nn.Module):
    """Two linear layers with two experts between them."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(normal(6, 4, seed=1))
        self.bias = torch.nn.Parameter(normal(6, seed=2))
        self.experts = torch.nn.ParameterList(normal(5, 6, seed=3 + i) for i in range(2))
        self.last = torch.nn.Parameter(normal(3, 5, seed=5))

    def forward(self, rows, counts, fuses=True):
        inner = column_parallel_linear(rows, self.first, self.bias, None, fuses_wgrad=fuses)
        inner = grouped_linear(inner, list(self.experts), torch.tensor(counts), fuses_wgrad=fuses)
        return row_parallel_linear(inner, self.last, None, fuses_wgrad=fuses)


def wrap(model, **options):
    groups = ProcessGroupCollection()
    config = ModelParallelConfig(params_dtype=torch.float64)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), model, pg_collection=groups)


def backward(model, seed, queue=None, counts=(7, 0), fuses=True):
    """One microbatch: forward under `queue`, backward."""
    with deferring(queue):
        out = model(normal(7, 4, seed=seed).requires_grad_(), counts, fuses)
    out.backward(normal(7, 3, seed=seed + 1))


def gradients(model, name):
    return {key: getattr(param, name).clone() for key, param in model.named_parameters()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left), [n for n in left if (left[n] != right[n]).any()]


@pytest.mark.parametrize("counts", [(7, 0), (3, 4), (0, 7)])
def test_flush_gives_the_bits_of_backward_without_a_gradient_buffer(counts):
    plain, delayed, queue = Model(), Model(), WgradQueue()
    for seed in (10, 20):
        backward(plain, seed, counts=counts)
        backward(delayed, seed, queue, counts)
        queue.flush()
    assert queue.num_computed == 6
    assert_equal(gradients(delayed, "grad"), gradients(plain, "grad"))


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_flush_gives_the_bits_of_backward_in_main_gradients(overlap, fuses):
    plain, delayed = (wrap(Model(), overlap_grad_reduce=overlap, bucket_size=1) for _ in range(2))
    for model, is_delayed in ((plain, False), (delayed, True)):
        for step in range(2):
            model.zero_grad_buffer()
            for seed in (10, 20):
                queue = WgradQueue() if is_delayed else None
                if seed == 10:
                    with model.no_sync():
                        backward(model, seed + step, queue, fuses=fuses)
                        flush(queue)
                else:
                    backward(model, seed + step, queue, fuses=fuses)
                    flush(queue)
            model.finish_grad_sync()
    assert_equal(gradients(delayed.module, "main_grad"), gradients(plain.module, "main_grad"))
    assert not delayed.module.experts[1].main_grad.any()


def flush(queue):
    if queue is not None:
        assert len(queue) == 3
        queue.flush()
        assert len(queue) == 0


def test_fused_and_separate_accumulation_agree_to_the_bit_in_fp64():
    fused, separate = wrap(Model()), wrap(Model())
    for seed in (10, 20):
        backward(fused, seed)
        backward(separate, seed, fuses=False)
    assert_equal(gradients(fused.module, "main_grad"), gradients(separate.module, "main_grad"))


def test_a_fused_gradient_of_half_precision_operands_is_not_rounded():
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    weight.main_grad = torch.full((1, 1), 256.0)
    rows = torch.tensor([[1.0], [0.0078125]], dtype=torch.bfloat16)
    row_parallel_linear(rows, weight, None).backward(torch.ones(2, 1, dtype=torch.bfloat16))
    assert weight.main_grad.item() == 257.0078125


def test_two_microbatches_in_flight_keep_apart():
    model, queues = Model(), (WgradQueue(), WgradQueue())
    outs = []
    for seed, queue in zip((10, 20), queues, strict=True):
        with deferring(queue):
            outs.append(model(normal(7, 4, seed=seed).requires_grad_(), (7, 0)))
    for out, seed in zip(outs, (10, 20), strict=True):
        out.backward(normal(7, 3, seed=seed + 1))
    queues[1].flush()
    only_second = Model()
    backward(only_second, 20)
    weights = ["first", "last", "experts.0", "experts.1"]
    got, expected = gradients(model, "grad"), gradients(only_second, "grad")
    assert_equal({name: got[name] for name in weights}, {name: expected[name] for name in weights})
    assert len(queues[0]) == 3


def test_a_parameter_is_reported_once_in_the_last_microbatch_and_after_its_product(monkeypatch):
    model, queue, reports = wrap(Model(), overlap_grad_reduce=True), WgradQueue(), []
    names = {param: name for name, param in model.module.named_parameters()}

    def note(bucket, param):
        reports.append((names[param], len(queue), bool(param.main_grad.any())))

    monkeypatch.setattr("megatron.core.distributed.bucket_group.BucketGroup.mark_ready", note)
    with model.no_sync():
        backward(model, 10, queue, (3, 4))
        queue.flush()
    assert reports == []
    model.zero_grad_buffer()
    backward(model, 20, queue, (3, 4))
    assert reports == [("bias", 3, True)]
    queue.flush()
    assert sorted(name for name, _, _ in reports) == sorted(names.values())
    assert all(has_gradient for _, _, has_gradient in reports)


def test_a_queue_that_was_never_flushed_is_named():
    model, queue = wrap(Model()), WgradQueue()
    backward(model, 10, queue)
    with pytest.raises(RuntimeError, match=r"weight gradients of first, last, experts\.0, experts\.1 still wait in a"):
        model.finish_grad_sync()
    model.zero_grad_buffer()
    backward(model, 10)
    model.finish_grad_sync()


def _put_and_report(queue, params, compute):
    """Mutant: reports when the product is put off."""
    queue._waiting.append((tuple(params), compute))
    for param in params:
        param.gradient_report.on_ready(param)


def _never_deferred(param):
    """Mutant: the hook of autograd reports as well."""
    return False


def test_a_report_before_the_product_is_caught():
    with replaced(WgradQueue, "put", _put_and_report):
        model, queue = wrap(Model(), overlap_grad_reduce=True), WgradQueue()
        with pytest.raises(AssertionError, match="was marked ready twice in one step"):
            backward(model, 10, queue)


def test_a_second_report_is_caught():
    with replaced(distributed_data_parallel, "is_wgrad_deferred", _never_deferred):
        model, queue = wrap(Model(), overlap_grad_reduce=True, bucket_size=1), WgradQueue()
        backward(model, 10, queue)
        with pytest.raises(AssertionError, match="was marked ready"):
            queue.flush()
