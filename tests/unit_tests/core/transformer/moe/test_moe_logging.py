"""Router figures for the log line."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import MoEMetrics
from tests.common.moe_layers import moe_config, normal


def model(numbers, groups, **fields):
    """MoE layers with the given global numbers; a stage without any still knows the configuration."""
    config = moe_config(num_layers=3, **fields)
    chunk = torch.nn.Module()
    chunk.config = config
    chunk.layers = torch.nn.ModuleList(MoELayer(config, layer_number=n, pg_collection=groups) for n in numbers)
    return chunk


def record(chunk, values):
    """Pretend that layers saw these losses in two microbatches each."""
    for layer, value in zip(chunk.layers, values, strict=True):
        for _ in range(2):
            layer.router.metrics.add("load_balancing_loss", torch.tensor(value))
            layer.router.metrics.add_forward()


def test_mean_over_microbatches_and_layers_and_reset():
    chunk = model([1, 3], ProcessGroupCollection(), moe_aux_loss_coeff=0.01, moe_per_layer_logging=True)
    record(chunk, [1.0, 3.0])
    metrics = MoEMetrics([chunk])
    assert metrics.reduce_and_reset(2, ProcessGroupCollection()) == {
        "load_balancing_loss": 2.0,
        "moe/load_balancing_loss_layer_0": 1.0,
        "moe/load_balancing_loss_layer_2": 3.0,
    }
    assert metrics.reduce_and_reset(2, ProcessGroupCollection()) == {}


def test_load_imbalance_is_busiest_over_mean():
    chunk = model([1, 2], ProcessGroupCollection())
    record(chunk, [0.0, 0.0])
    chunk.layers[0].router.apply_step_counts(torch.tensor([10, 30, 20, 20]))
    chunk.layers[1].router.apply_step_counts(torch.tensor([5, 5, 5, 5]))
    figures = MoEMetrics(chunk).reduce_and_reset(2, ProcessGroupCollection())
    assert figures == {"moe_load_imbalance": 1.25, "moe_load_imbalance_max": 1.5}


def test_value_of_a_real_layer_is_the_loss_without_its_coefficient():
    chunk = model([1], ProcessGroupCollection(), moe_aux_loss_coeff=0.01, moe_z_loss_coeff=1e-3)
    for _ in range(3):
        chunk.layers[0](normal(8, 2, 16))
    figures = MoEMetrics(chunk).reduce_and_reset(3, ProcessGroupCollection())
    assert figures["load_balancing_loss"] == pytest.approx(1.0, abs=0.2)
    assert figures["z_loss"] == pytest.approx(torch.tensor(4.0).log().item() ** 2, abs=0.2)


def test_dense_model_answers_nothing():
    chunk = torch.nn.Linear(2, 2)
    assert MoEMetrics(chunk).reduce_and_reset(1, ProcessGroupCollection()) == {}


def on_a_stage(moe_rank):
    """Two pipeline stages, MoE layers on one of them only."""
    world = dist.group.WORLD
    groups = ProcessGroupCollection(pp=world)
    numbers = [2, 3] if dist.get_rank() == moe_rank else []
    chunk = model(numbers, ProcessGroupCollection(), moe_aux_loss_coeff=0.01)
    record(chunk, [1.0, 3.0][: len(numbers)])
    return MoEMetrics(chunk).reduce_and_reset(2, groups)


@pytest.mark.parametrize("moe_rank", [0, 1])
def test_stages_without_moe_layers_take_part(pool, moe_rank):
    assert pool.run(on_a_stage, moe_rank, deadline_s=20.0) == [{"load_balancing_loss": 2.0}] * 2


def test_table_lies_where_the_model_does():
    """Without MoE layers too, whatever the groups' backends are: gloo and NCCL would wait for each other for ever."""
    chunk = model([], ProcessGroupCollection())
    chunk.dense = torch.nn.Linear(1, 1, device="meta")
    assert MoEMetrics(chunk).reduce(ProcessGroupCollection()).device.type == "meta"


def on_a_replica(kind):
    """Two data-parallel replicas with the same values on both."""
    world = dist.group.WORLD
    groups = ProcessGroupCollection(dp=world, dp_cp=world, tp_dp_cp=world)
    label = {"aux_loss": "load_balancing_loss", "global_aux_loss": "global_load_balancing_loss"}[kind]
    chunk = model([1], ProcessGroupCollection(), moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.01)
    chunk.layers[0].router.metrics.add(label, 3.0)
    chunk.layers[0].router.metrics.add_forward()
    return MoEMetrics(chunk).reduce_and_reset(1, groups)


def test_replicas_are_averaged_except_for_the_global_loss(pool):
    assert pool.run(on_a_replica, "aux_loss") == [{"load_balancing_loss": 3.0}] * 2
    assert pool.run(on_a_replica, "global_aux_loss") == [{"global_load_balancing_loss": 6.0}] * 2
