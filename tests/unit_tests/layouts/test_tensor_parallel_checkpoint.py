"""Checkpoints of layouts of TP, CP, EP and ETP: boxes that tile, and other layouts that load them."""

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load, save
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.module_api.sharded_state import sharded_model_state
from megatron.core.module_api.weight_init import local_slice
from megatron.core.param_attrs import param_attrs
from tests.common.layouts import Layout
from tests.common.reference_model import parameter_shapes
from tests.unit_tests.layouts.cases import SEQ_LENGTH, make_case
from tests.unit_tests.layouts.test_tensor_parallel_sweep import EXPERTS, SHAPE, moe

CASE = make_case(SHAPE, **EXPERTS)
LAYOUTS = [
    moe(tp=tp, dp=4 // tp, ep=ep, etp=etp)
    for tp, ep, etp in itertools.product((1, 2), (1, 2, 4), (1, 2))
    if 4 % (ep * etp) == 0
] + [moe(cp=2, ep=2, etp=1), moe(tp=1, dp=2, cp=2, ep=2, etp=2)]


def build(layout, vocab_size=16, true_vocab_size=None):
    """The model of this rank."""
    parallel_state.initialize_model_parallel(
        layout.tp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    config = CASE.config(layout)
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config),
        vocab_size=vocab_size,
        max_sequence_length=SEQ_LENGTH,
        position_embedding_type="rope",
        true_vocab_size=true_vocab_size,
    )
    return config, model


def numbered_boxes(layout):
    """Boxes of this rank's parameters when every element holds its index in the whole tensor."""
    config, model = build(layout)
    for name, param in named_global_parameters(model):
        full = parameter_shapes(CASE.config(Layout()), SHAPE)[name]
        numbers = torch.arange(torch.Size(full).numel(), dtype=torch.float64).view(full)
        param.data.copy_(local_slice(numbers, tuple(param.shape), param_attrs(param)))
    boxes = sharded_model_state(model, config)
    return [(b.key, b.global_shape, b.global_offset, b.local_shape, b.view().clone()) for b in boxes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_boxes_tile_every_tensor_and_hold_each_element_once(pool, layout):
    painted, numbers, seen = {}, {}, set()
    for rank in pool.run(numbered_boxes, layout, world_size=4):
        for key, shape, offset, size, data in rank:
            place = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
            if (key, offset) in seen:
                assert torch.equal(numbers[key][place], data), f"{key} at {offset}: copies differ"
                continue
            seen.add((key, offset))
            painted.setdefault(key, torch.zeros(shape))[place] += 1
            numbers.setdefault(key, torch.zeros(shape, dtype=torch.float64))[place] = data
    assert len(painted) > 10
    for key, count in painted.items():
        assert bool((count == 1).all()), f"{key}: boxes overlap or leave a hole"
        lead = 1 if ".experts.experts." in key else 0  # experts are stacked in front
        for whole in numbers[key].flatten(0, lead).split(numbers[key].shape[lead]) if lead else [numbers[key]]:
            assert torch.equal(whole.flatten(), torch.arange(whole.numel(), dtype=torch.float64)), key


def save_shifted(layout, folder, vocab_size):
    """Save the initial weights plus one."""
    config, model = build(layout, vocab_size, true_vocab_size=13)
    for param in model.parameters():
        param.data.add_(1.0)
    save(folder, sharded_model_state(model, config), {})


def load_into(layout, folder, vocab_size, true_vocab_size=13):
    """Return (names that are not the initial weights plus one, after loading)."""
    config, model = build(layout, vocab_size, true_vocab_size)
    initial = {name: param.detach().clone() for name, param in named_global_parameters(model)}
    load(folder, sharded_model_state(model, config))
    wrong = []
    for name, param in named_global_parameters(model):
        expected = initial[name] + 1.0
        if param_attrs(param).is_embedding_or_output:
            first = param_attrs(param).partition_rank * param.shape[0]
            real = max(13 - first, 0)
            if not torch.equal(param[:real], expected[:real]):
                wrong.append(name)
        elif not torch.equal(param, expected):
            wrong.append(name)
    dist.barrier()
    return wrong


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (moe(ep=2, etp=1), Layout()),
        (moe(dp=2, ep=2, etp=2), Layout()),
        (Layout(), moe(etp=2)),
        (moe(tp=1, cp=2, ep=2, etp=1), moe(cp=2, ep=4, etp=1)),
        (moe(ep=2, etp=1), moe(dp=2, ep=4, etp=1)),
    ],
    ids=str,
)
def test_other_layout_loads_weights_bitwise_and_real_rows_survive(pool, tmp_path, saved, loaded):
    sizes = [14 * layout.tp for layout in (saved, loaded)]
    pool.run(save_shifted, saved, tmp_path / "saved", sizes[0], world_size=saved.world_size)
    wrong = pool.run(load_into, loaded, tmp_path / "saved", sizes[1], world_size=loaded.world_size)
    assert wrong == [[]] * loaded.world_size


def test_checkpoint_with_fewer_rows_than_the_vocabulary_is_refused(tmp_path, pool):
    pool.run(save_shifted, Layout(), tmp_path / "saved", 14, world_size=1)
    with pytest.raises(AssertionError, match=CheckpointError.__name__) as caught:
        pool.run(load_into, Layout(), tmp_path / "saved", 16, 15, world_size=1)
    assert "output_layer.weight: stored [14, 8], the model has [16, 8]" in str(caught.value)
