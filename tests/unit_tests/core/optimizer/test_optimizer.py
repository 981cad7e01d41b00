"""The step, its state, and what makes it stop."""

import copy

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.step_guard import StepGuard


class Model(torch.nn.Module):
    """A matrix and a vector; gradients are put in by the tests."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.matrix = torch.nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype))
        self.vector = torch.nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64).to(dtype))


def seeded_grads(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((3, 4), (5,))]


def put_grads(model, grads):
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.main_grad = grad.clone()


def reference_adam(weight, grads, lr, decay, betas, eps, is_decoupled):
    """Adam as published, in fp64."""
    mean = square = torch.zeros_like(weight)
    for t, grad in enumerate(grads, start=1):
        if is_decoupled:
            weight = weight - lr * decay * weight
        else:
            grad = grad + decay * weight
        mean = betas[0] * mean + (1 - betas[0]) * grad
        square = betas[1] * square + (1 - betas[1]) * grad * grad
        weight = weight - lr * (mean / (1 - betas[0] ** t)) / ((square / (1 - betas[1] ** t)).sqrt() + eps)
    return weight


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_adam_equals_the_published_formula(is_decoupled):
    config = OptimizerConfig(
        lr=0.01, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.0, decoupled_weight_decay=is_decoupled
    )
    model, start = Model(), Model()
    optimizer = get_megatron_optimizer(config, [model])
    for step in range(6):
        put_grads(model, seeded_grads(step))
        optimizer.step()
    matrix_grads, vector_grads = zip(*(seeded_grads(step) for step in range(6)), strict=True)
    expected = reference_adam(start.matrix, matrix_grads, 0.01, 0.1, (0.9, 0.95), 1e-8, is_decoupled)
    torch.testing.assert_close(model.matrix, expected, rtol=1e-9, atol=0.0)
    expected = reference_adam(start.vector, vector_grads, 0.01, 0.0, (0.9, 0.95), 1e-8, is_decoupled)
    torch.testing.assert_close(model.vector, expected, rtol=1e-9, atol=0.0)


def test_sgd_with_momentum_follows_literal_values():
    model = Model()
    model.vector.data.fill_(1.0)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.5, clip_grad=0.0), [model]
    )
    values = []
    for _ in range(3):
        put_grads(model, [torch.zeros(3, 4, dtype=torch.float64), torch.ones(5, dtype=torch.float64)])
        optimizer.step()
        values.append(model.vector[0].item())
    assert values == [0.5, -0.25, -1.125]  # velocity 1, 1.5, 1.75


def test_bf16_weights_collect_updates_that_they_cannot_hold_one_by_one():
    model = Model(torch.bfloat16)
    model.vector.data.fill_(1.0)
    config = OptimizerConfig(optimizer="sgd", lr=2.0**-10, sgd_momentum=0.0, clip_grad=0.0, bf16=True)
    optimizer = get_megatron_optimizer(config, [model])
    for _ in range(4):
        put_grads(model, [torch.zeros(3, 4), torch.ones(5)])
        optimizer.step()
    assert model.vector[0].item() == 0.99609375


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_must_be_announced(dtype):
    with pytest.raises(ConfigError, match=r"(fp16|bf16)=False with parameter 'matrix' in torch\.b?float16"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [Model(dtype)])


def test_step_reports_norm_before_clipping_and_zeros():
    model = Model()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=1.0, log_num_zeros_in_grad=True), [model])
    put_grads(model, [torch.zeros(3, 4, dtype=torch.float64), torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0]).double()])
    assert optimizer.step() == (True, 5.0, 15)
    assert model.vector.main_grad.norm().item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.01], ids=["clipped", "kept"])
@pytest.mark.parametrize("on_device", [False, True])
def test_clipping_inside_the_update_changes_nothing(monkeypatch, scale, on_device):
    results = []
    for inside in (False, True):
        monkeypatch.setattr(MegatronOptimizer, "_clips_in_update", inside)
        model = Model().float()
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=1.0), [model])
        for step in (1, 2):
            put_grads(model, [grad * scale for grad in seeded_grads(step, torch.float32)])
            if on_device:
                optimizer.step_on_device(StepGuard(torch.device("cpu")), refuses_non_finite=True)
            else:
                optimizer.step()
        results.append([value for param in model.parameters() for value in (param.detach(), param.main_grad)])
        assert optimizer._inner.grad_scale is None
    for inside, outside in zip(*results, strict=True):
        torch.testing.assert_close(inside, outside, rtol=1e-6 if scale == 1.0 else 0.0, atol=0.0)


def test_clipping_can_be_switched_off():
    model = Model()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [model])
    put_grads(model, [torch.zeros(3, 4, dtype=torch.float64), torch.full((5,), 10.0, dtype=torch.float64)])
    optimizer.step()
    assert model.vector.main_grad.tolist() == [10.0] * 5


def fp16_optimizer(model, **fields):
    return get_megatron_optimizer(OptimizerConfig(lr=0.1, fp16=True, initial_loss_scale=8.0, **fields), [model])


def test_gradients_are_divided_by_the_loss_scale():
    model = Model(torch.float16)
    optimizer = fp16_optimizer(model)
    assert optimizer.scale_loss(torch.tensor(2.0)).item() == 16.0
    put_grads(model, [torch.zeros(3, 4), torch.tensor([24.0, 32.0, 0.0, 0.0, 0.0])])
    assert optimizer.step()[1] == 5.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_overflow_skips_the_step_and_lowers_the_scale(value):
    model = Model(torch.float16)
    optimizer = fp16_optimizer(model, hysteresis=1)
    put_grads(model, seeded_grads(0, torch.float32))
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    put_grads(model, [torch.zeros(3, 4), torch.tensor([1.0, value, 0.0, 0.0, 0.0])])
    assert optimizer.step() == (False, None, None)
    assert optimizer.get_loss_scale().item() == 4.0
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()["state"]), before, rtol=0.0, atol=0.0)


def step_with_overflow_on_one_rank():
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = Model(torch.float16)
    model.matrix.allreduce = False
    optimizer = fp16_optimizer(model, hysteresis=1)
    put_grads(model, [torch.full((3, 4), float("inf") if dist.get_rank() == 1 else 1.0), torch.ones(5)])
    return optimizer.step(), optimizer.get_loss_scale().item()


def test_all_ranks_skip_when_one_expert_overflows(pool):
    assert pool.run(step_with_overflow_on_one_rank, world_size=2) == [((False, None, None), 4.0)] * 2


def test_zero_grad_drops_or_clears():
    model = Model()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    model.vector.grad = torch.ones(5, dtype=torch.float64)
    optimizer.zero_grad(set_to_none=False)
    assert model.vector.grad.tolist() == [0.0] * 5
    optimizer.zero_grad()
    assert model.vector.grad is None


RESUME_CASES = [
    ("adam", torch.float32, {}),
    ("adam", torch.float64, {}),
    ("adam", torch.bfloat16, {"bf16": True}),
    ("adam", torch.float16, {"fp16": True, "initial_loss_scale": 4.0, "loss_scale_window": 4}),
    ("sgd", torch.bfloat16, {"bf16": True}),
]


def run_steps(model, optimizer, steps):
    dtype = torch.float64 if model.matrix.dtype == torch.float64 else torch.float32
    for step in steps:
        scale = optimizer.get_loss_scale().item()
        put_grads(model, [grad * scale for grad in seeded_grads(step, dtype)])
        optimizer.step()


@pytest.mark.parametrize(("algorithm", "dtype", "fields"), RESUME_CASES)
def test_resumed_optimizer_continues_bitwise(algorithm, dtype, fields):
    config = OptimizerConfig(optimizer=algorithm, lr=0.01, clip_grad=1.0, **fields)
    whole = Model(dtype)
    whole_optimizer = get_megatron_optimizer(config, [whole])
    run_steps(whole, whole_optimizer, range(3))
    saved = copy.deepcopy((whole.state_dict(), whole_optimizer.state_dict()))
    run_steps(whole, whole_optimizer, range(3, 6))

    resumed = Model(dtype)
    resumed.vector.data.zero_()
    resumed_optimizer = get_megatron_optimizer(config, [resumed])
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    run_steps(resumed, resumed_optimizer, range(3, 6))
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0.0, atol=0.0)
    state, expected = resumed_optimizer.state_dict(), whole_optimizer.state_dict()
    torch.testing.assert_close(state.pop("state"), expected.pop("state"), rtol=0.0, atol=0.0)
    assert state == expected


def test_state_has_its_full_structure_before_the_first_step():
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=True), [Model(torch.bfloat16)])
    shapes = {
        name: {key: list(t.shape) for key, t in tensors.items()} for name, _, tensors, _ in optimizer.named_state()
    }
    assert shapes == {
        "matrix": {"step": [], "exp_avg": [3, 4], "exp_avg_sq": [3, 4], "main_param": [3, 4]},
        "vector": {"step": [], "exp_avg": [5], "exp_avg_sq": [5], "main_param": [5]},
    }


def test_foreign_state_is_refused_by_name():
    config = OptimizerConfig(lr=0.1)
    optimizer, state = get_megatron_optimizer(config, [Model()]), get_megatron_optimizer(config, [Model()]).state_dict()
    state["state"]["other"] = state["state"].pop("vector")
    with pytest.raises(CheckpointError, match=r"optimizer state: missing \['vector'\], not expected \['other'\]"):
        optimizer.load_state_dict(state)


def test_state_of_another_shape_or_precision_is_refused():
    config = OptimizerConfig(lr=0.1)
    optimizer, state = get_megatron_optimizer(config, [Model()]), get_megatron_optimizer(config, [Model()]).state_dict()
    state["state"]["vector"]["exp_avg"] = torch.zeros(6, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"'vector.exp_avg' is torch.float64 \[6\] in the saved optimizer state"):
        optimizer.load_state_dict(state)


def test_main_copies_follow_weights_loaded_without_state():
    model = Model(torch.bfloat16)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0, bf16=True), [model])
    model.vector.data.fill_(2.0)
    optimizer.reload_model_params()
    put_grads(model, seeded_grads(0, torch.float32))
    optimizer.step()
    assert model.vector.tolist() == [2.0] * 5


def test_missing_learning_rate_is_refused():
    with pytest.raises(ConfigError, match="lr=None: an optimizer needs a learning rate"):
        get_megatron_optimizer(OptimizerConfig(), [Model()])


def test_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="the model has no parameters"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [torch.nn.Identity()])
