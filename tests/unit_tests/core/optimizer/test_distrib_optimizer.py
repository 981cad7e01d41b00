"""The step of the sharded optimizer; T56 and T60 of the known traps."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.sharded_params import ShardedMainParams
from megatron.core.utils.stacked import stacked
from megatron.training.checkpoint_state import optimizer_tensors
from tests.common.layouts import Layout
from tests.common.mutants import replaced
from tests.unit_tests.layouts.cases import SEQ_LENGTH, VOCAB_SIZE, make_case


class DenseAndExpert(torch.nn.Module):
    """Two dense vectors and an expert of one rank; forward [3 scales] -> sum of scale * parameter."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, numel in (("a", 100), ("b", 7), ("expert", 90)):
            param = torch.nn.Parameter(torch.randn(numel, generator=generator).to(dtype))
            self.register_parameter(name, param)
        self.expert.allreduce = False

    def forward(self, scales):
        return sum((param * scale).sum() for param, scale in zip(self.parameters(), scales, strict=True))


def wrap(module, **ddp_fields):
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, **ddp_fields)
    return DistributedDataParallel(ModelParallelConfig(), ddp_config, module)


def sharded_adam(chunk, **fields):
    config = OptimizerConfig(lr=0.1, weight_decay=0.1, bf16=True, use_distributed_optimizer=True, **fields)
    return get_megatron_optimizer(config, [chunk])


def one_sharded_step(overlap):
    """Scales are 1, 2, 3 on rank 0 and three times that on rank 1; returns the gathered parameters."""
    parallel_state.initialize_model_parallel()
    module = DenseAndExpert(torch.bfloat16)
    overlaps = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    chunk = wrap(module, bucket_size=1, **overlaps)
    optimizer = sharded_adam(chunk, clip_grad=0.0)
    chunk([factor * (1.0 + 2.0 * dist.get_rank()) for factor in (1.0, 2.0, 3.0)]).backward()
    chunk.finish_grad_sync()
    optimizer.step()
    chunk.finish_param_sync()
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def step_of_one_process():
    """torch's Adam on fp32 copies; the mean gradients are 2, 4, 6."""
    module = DenseAndExpert(torch.bfloat16)
    expected = {}
    for (name, param), grad in zip(module.named_parameters(), (2.0, 4.0, 6.0), strict=True):
        main = torch.nn.Parameter(param.detach().float())
        main.grad = torch.full_like(main, grad)
        torch.optim.AdamW([main], lr=0.1, weight_decay=0.0, eps=1e-8, fused=True).step()
        expected[name] = main.detach().bfloat16()
    return expected


@pytest.mark.parametrize("overlap", [False, True])
def test_gathered_parameters_are_the_rounded_step_of_one_process(pool, overlap):
    expected = step_of_one_process()
    for got in pool.run(one_sharded_step, overlap, world_size=2):
        assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def one_step_gathered_too_early():
    """Parameters travel before the shards are rounded into them."""
    original = ShardedMainParams.write_back

    def early(self, is_rounded=False):
        for chunk in self.chunks:
            chunk.start_param_sync()
        chunks, self.chunks = self.chunks, []
        original(self)
        self.chunks = chunks

    with replaced(ShardedMainParams, "write_back", early):
        return one_sharded_step(False)


def test_gather_before_the_update_is_seen(pool):
    first, second = pool.run(one_step_gathered_too_early, world_size=2)
    assert not torch.equal(first["a"], second["a"])


def test_parameters_are_views_of_one_buffer():
    module = DenseAndExpert(torch.float32)
    before = [param.detach().clone() for param in module.parameters()]
    chunk = wrap(module)
    dense = chunk.buffers_by_kind[(torch.float32, False)].param_data
    assert {p.untyped_storage().data_ptr() for p in (module.a, module.b)} == {dense.untyped_storage().data_ptr()}
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_weights_of_grouped_experts_stay_one_operand():
    """No copy is made for the grouped product: the stacked weights begin where the first one does."""
    config = make_case(add_bias_linear=True).config(Layout(dtype=torch.float32, is_grouped=True))
    model = GPTModel(config, get_gpt_decoder_block_spec(config), VOCAB_SIZE, SEQ_LENGTH)
    wrap(model)
    linear = model.decoder.layers[1].mlp.experts.linear_fc1
    assert stacked(linear.weights).data_ptr() == linear.weights[0].data_ptr()


def test_unwrapped_model_is_refused_with_the_remedy():
    with pytest.raises(
        ConfigError, match=r"use_distributed_optimizer=True with a model chunk of type DenseAndExpert: "
    ):
        sharded_adam(DenseAndExpert(torch.bfloat16))


def test_overlapping_gather_without_its_conditions_is_refused():
    with pytest.raises(ConfigError) as error:
        DistributedDataParallelConfig(overlap_param_gather=True)
    assert "overlap_param_gather=True with use_distributed_optimizer=False" in str(error.value)
    assert "overlap_param_gather=True with overlap_grad_reduce=False" in str(error.value)


def nan_on_one_rank(loss_scale):
    """Rank 1 alone has an infinite gradient; both must skip, and weights and moments stay."""
    parallel_state.initialize_model_parallel()
    module = DenseAndExpert(torch.bfloat16)
    chunk = wrap(module)
    optimizer = sharded_adam(chunk, loss_scale=loss_scale)
    before = [param.detach().clone() for param in module.parameters()]
    module.b.main_grad.fill_(float("inf") if dist.get_rank() == 1 else 1.0)
    chunk.finish_grad_sync()
    result = optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    return result, any(moved), any(bool(s.tensors["exp_avg"].any()) for s in optimizer.named_state())


def test_overflow_in_one_shard_skips_the_step_everywhere(pool):
    """`b` lies in one shard: its owner alone sees the overflow after the reduction."""
    assert pool.run(nan_on_one_rank, 4.0, world_size=2) == [((False, None, None), False, False)] * 2


def nan_before_the_reduction():
    parallel_state.initialize_model_parallel()
    module = DenseAndExpert(torch.bfloat16)
    chunk = wrap(module, check_for_nan_in_grad=True)
    module.b.main_grad[3] = float("nan")
    with pytest.raises(RuntimeError) as error:
        chunk.finish_grad_sync()
    return str(error.value)


def test_nan_gradient_is_named_on_every_rank_before_it_is_reduced(pool):
    for rank, text in enumerate(pool.run(nan_before_the_reduction, world_size=2)):
        assert text.startswith(f"rank {rank}: check_for_nan_in_grad=True: NaN or infinity in the gradient of b ")


# Checkpoints.


def model_and_optimizer(ep, is_sharded):
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    config = make_case().config(Layout(ep=ep, dtype=torch.float32))
    model = GPTModel(config, get_gpt_decoder_block_spec(config), VOCAB_SIZE, SEQ_LENGTH)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
    chunk = DistributedDataParallel(config, ddp_config, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, use_distributed_optimizer=is_sharded), [chunk])
    return SimpleNamespace(model=[chunk], optimizer=optimizer, model_config=config)


def boxes_of_rank(ep, is_sharded):
    run = model_and_optimizer(ep, is_sharded)
    return [(t.key, t.global_shape, t.global_offset, t.local_shape) for t in optimizer_tensors(run)]


@pytest.mark.parametrize(
    ("world_size", "ep", "is_sharded"),
    [
        (2, 1, True),
        (4, 2, True),
        (4, 4, False),
        pytest.param(2, 2, True, marks=pytest.mark.full),
        pytest.param(4, 4, True, marks=pytest.mark.full),
    ],
)
def test_boxes_of_all_ranks_tile_every_moment(pool, world_size, ep, is_sharded):
    covered = {}
    for key, shape, offset, size in set(
        itertools.chain(*pool.run(boxes_of_rank, ep, is_sharded, world_size=world_size))
    ):
        count = covered.setdefault(key, torch.zeros(shape, dtype=torch.int8))
        count[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
    assert "optimizer.state.exp_avg.decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in covered
    assert [key for key, count in covered.items() if not bool((count == 1).all())] == []


def write_state(folder, ep, is_sharded):
    """Moments that are different in every element of every parameter: the element's number, times a name's length."""
    run = model_and_optimizer(ep, is_sharded)
    for state in run.optimizer.named_state():
        begin, end = state.flat_range or (0, state.param.numel())
        for key in ("exp_avg", "exp_avg_sq"):
            values = torch.arange(begin, end, dtype=torch.float32) + len(state.name + key)
            state.tensors[key].copy_(values.view(state.tensors[key].shape))
        state.tensors["step"].fill_(7.0)
    dist_checkpointing.save(folder, optimizer_tensors(run), {})


def read_state(folder, ep, is_sharded):
    run = model_and_optimizer(ep, is_sharded)
    dist_checkpointing.load(folder, optimizer_tensors(run))
    wrong = []
    for state in run.optimizer.whole_state():
        for key in ("exp_avg", "exp_avg_sq"):
            expected = torch.arange(state.param.numel(), dtype=torch.float32) + len(state.name + key)
            if not torch.equal(state.tensors[key].flatten(), expected):
                wrong.append((state.name, key))
        if state.tensors.get("step", torch.tensor(7.0)).item() != 7.0:
            wrong.append((state.name, "step"))
    return wrong


@dataclasses.dataclass(frozen=True)
class Saved:
    """A layout on one side of a checkpoint."""

    world_size: int
    ep: int
    is_sharded: bool


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Saved(2, 1, True), Saved(4, 2, True)),
        pytest.param(Saved(4, 2, True), Saved(1, 1, False), marks=pytest.mark.full),
        pytest.param(Saved(1, 1, False), Saved(4, 1, True), marks=pytest.mark.full),
        pytest.param(Saved(4, 4, True), Saved(2, 2, True), marks=pytest.mark.full),
        pytest.param(Saved(1, 1, True), Saved(2, 1, False), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_moments_load_exactly_into_any_layout(pool, tmp_path, source, target):
    folder = tmp_path / "moments"
    pool.run(write_state, folder, source.ep, source.is_sharded, world_size=source.world_size)
    wrong = pool.run(read_state, folder, target.ep, target.is_sharded, world_size=target.world_size)
    assert wrong == [[]] * target.world_size
