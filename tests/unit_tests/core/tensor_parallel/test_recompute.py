"""Recompute in one process: what is kept, that routing is decided once, that nothing is counted twice, random states.

Legend of shapes: 5 positions, 2 samples, width 32, 4 heads of 8; 2 of 4 experts for each token, hence 20 rows.
"""

import functools
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch

from megatron.core.deferred_wgrad import WgradQueue, active_queue, deferring
from megatron.core.fp8 import layer_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import recompute
from megatron.core.tensor_parallel.random import DeviceRngState, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.recompute import checkpoint, recomputed_on_use
from megatron.core.transformer.moe import router
from megatron.core.transformer.transformer_block import TransformerBlock
from tests.common.kept import watch_storages
from tests.common.mutants import replaced
from tests.common.small_models import SWIGLU, normal, small_config

HIDDEN = (5, 2, 32)
X = normal(*HIDDEN)
FIELDS = SWIGLU | {
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1],
    "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 20,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_shared_expert_intermediate_size": 28,
    "moe_token_dispatcher_type": "alltoall",
    "attention_backend": "unfused",
    "normalization": "RMSNorm",
}
FP8 = {"fp8": "hybrid", "bf16": True, "params_dtype": torch.bfloat16} | dict.fromkeys(
    ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32
)
QUANTIZE_WEIGHT = layer_state.quantize_weight
CHECKPOINT_FORWARD, CHOOSE = recompute._Checkpoint.forward, router.TopKRouter.choose
COUNTS, METRICS = "layers.1.mlp.router.tokens_per_expert", "layers.1.mlp.router.metrics.sums"
SIDE_EFFECTS = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.05, 0.04, 0.03],
    "moe_z_loss_coeff": 0.02,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def full(method, count):
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


GRANULARITIES = {
    "uniform1": full("uniform", 1),
    "uniform2": full("uniform", 2),
    "block1": full("block", 1),
    "block2": full("block", 2),
    "moe": selective("moe"),
    "shared_experts": selective("shared_experts"),
    "all_modules": selective("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
}
# attention keeps its mask, the contiguous values, scores and probabilities; a product of heads is one storage
ATTENTION = {(5, 5): 1, (2, 4, 5, 8): 1, (2, 4, 5, 5): 1}
GONE = {
    "core_attn": {shape: 2 * count for shape, count in ATTENTION.items()},
    "layernorm": {HIDDEN: 4},
    "mlp": {(10, 96): 1, (5, 2, 48): 2},
    "moe": {
        (10, 4): 1,  # scores
        (10, 2): 1,  # weights; the choice stays
        (10, 56): 1,  # shared experts
        (5, 2, 28): 2,
        (20,): 3,  # probabilities and positions of the rows
        (20, 32): 1,  # experts
        (20, 40): 1,
        (20, 20): 1,
    },
    "moe_act": {(20, 20): 1},
    "shared_experts": {(10, 56): 1, (5, 2, 28): 2},
}


def build(**fields):
    model_parallel_cuda_manual_seed(7, device="cpu")
    config = small_config(**FIELDS | fields)
    return TransformerBlock(config, get_gpt_decoder_block_spec(config), post_layer_norm=False)


def kept_shapes(**fields):
    block, x = build(**fields), X.clone().requires_grad_()
    with watch_storages(x, *block.parameters(), *block.buffers()) as kept:
        output = block(x)
    assert output.shape == HIDDEN  # the output lives as well
    return kept()


@pytest.mark.parametrize("module", GONE)
def test_module_keeps_what_the_table_says(module):
    plain, again = kept_shapes(), kept_shapes(**selective(module))
    assert dict(plain - again) == GONE[module]
    assert again - plain == Counter()


@pytest.mark.parametrize(
    ("method", "count", "inputs"), [("uniform", 1, 2), ("uniform", 2, 1)], ids=["each_layer", "both_as_one"]
)
def test_whole_layers_keep_their_input_and_the_choice_of_experts(method, count, inputs):
    # x is given, so one hidden state for each further span, and the output
    assert kept_shapes(**full(method, count)) == Counter({HIDDEN: inputs, (10, 2): 1})


def test_block_keeps_everything_of_the_layers_behind():
    one, none = kept_shapes(**full("block", 1), num_layers=1, moe_layer_freq=[1]), kept_shapes(**full("block", 1))
    assert one == Counter({HIDDEN: 1, (10, 2): 1})
    assert none == kept_shapes(num_layers=1, moe_layer_freq=[1]) + Counter({HIDDEN: 1})


def test_nothing_is_recomputed_in_evaluation():
    block = build(**full("uniform", 1)).eval()
    assert torch.equal(block(X), build().eval()(X))
    assert block(X.clone().requires_grad_()).grad_fn.name() != "_CheckpointBackward"


class Fickle:
    """A top-k that returns another choice on every second call."""

    def __init__(self):
        self.num_calls = 0
        self.choose = router.select_topk

    def __call__(self, scores, rule):
        self.num_calls += 1
        indices = self.choose(scores, rule)
        return indices if self.num_calls % 2 else (indices + 1) % scores.shape[-1]


def tied_step(select, **fields):
    """Gradients of a step on identical tokens, of which the two MoE layers choose by `select`."""
    block = build(num_layers=3, moe_layer_freq=[0, 1, 1], **fields)
    x = X[:1, :1].expand(HIDDEN).clone().requires_grad_()
    with replaced(router, "select_topk", select):
        block(x).square().sum().backward()
    return {"x": x.grad} | {name: param.grad for name, param in block.named_parameters()}


@pytest.mark.parametrize("granularity", ["uniform1", "uniform2", "block2", "moe", "all_modules"])
def test_tied_tokens_go_where_the_first_pass_sent_them(granularity):
    fickle, steady = Fickle(), Fickle()
    again = tied_step(fickle, **GRANULARITIES[granularity])
    plain = tied_step(steady)
    assert fickle.num_calls == steady.num_calls == 2
    assert differences(plain, again) == set()
    assert again["layers.1.mlp.router.weight"].any()


def two_microbatches(**fields):
    """Gradients, counts, metrics and bias after two microbatches with dropout, and their outputs."""
    block, found = build(**SIDE_EFFECTS, hidden_dropout=0.2, attention_dropout=0.1, **fields), {}
    for seed in (1, 2):
        x = normal(*HIDDEN, seed=seed, dtype=block.config.params_dtype).requires_grad_()
        output = block(x)
        output.square().sum().backward()
        found |= {f"output{seed}": output, f"x{seed}": x.grad}
    return found | dict(block.named_buffers()) | {name: param.grad for name, param in block.named_parameters()}


def differences(plain, again):
    assert plain.keys() == again.keys()
    return {name for name in plain if not torch.equal(plain[name], again[name])}


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_losses_and_counts_happen_once(granularity):
    plain, again = two_microbatches(), two_microbatches(**GRANULARITIES[granularity])
    assert plain[COUNTS].sum() == 2 * 10 * 2
    assert (plain[METRICS][:4] > 0).all()  # one figure for each loss
    assert differences(plain, again) == set()


@contextmanager
def not_put_back(states):
    """The second pass leaves the random states where it ended."""
    states.restore()
    yield


def recording_first_pass(ctx, rerun, *inputs):
    """The first pass of a part records like the second."""
    with torch.enable_grad():
        return CHECKPOINT_FORWARD(ctx, rerun, *inputs).detach()


def choose_anew(router, logits, saved=None):
    """The second pass does not know the choice of the first."""
    return CHOOSE(router, logits)


MUTANTS = {
    "other_numbers": (lambda: replaced(recompute, "replayed", lambda states: nullcontext()), "x1"),
    "states_not_put_back": (lambda: replaced(recompute, "replayed", not_put_back), "output2"),
    "tokens_counted_twice": (
        lambda: replaced(recompute._Checkpoint, "forward", staticmethod(recording_first_pass)),
        COUNTS,
    ),
    "losses_logged_twice": (
        lambda: replaced(recompute._Checkpoint, "forward", staticmethod(recording_first_pass)),
        METRICS,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_comparison_notices_mutant(mutant):
    fault, name = MUTANTS[mutant]
    with fault():
        again = two_microbatches(**full("block", 2) | {"moe_layer_freq": [1, 0]})
    assert name.replace("layers.1", "layers.0") in differences(two_microbatches(moe_layer_freq=[1, 0]), again)


def test_comparison_notices_a_choice_made_anew():
    with replaced(router.TopKRouter, "choose", choose_anew):
        again = tied_step(Fickle(), **full("uniform", 1))
    assert "layers.1.mlp.router.weight" in differences(tied_step(Fickle()), again)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_codes_and_amaxes_are_those_of_one_pass(recipe, granularity):
    fields = FP8 | {"fp8_recipe": recipe}
    calls = []

    def count_weight(matrix, *args):
        calls.append(tuple(matrix.shape))
        return QUANTIZE_WEIGHT(matrix, *args)

    with replaced(layer_state, "quantize_weight", count_weight):
        plain = two_microbatches(**fields)
        once = len(calls)
        again = two_microbatches(**fields, **GRANULARITIES[granularity])
    assert once == 10  # qkv, projection, fc1, fc2 of both layers, fc1, fc2 of the shared experts
    assert len(calls) == 2 * once
    assert any(name.endswith("step_amax") for name in plain) == (recipe == "delayed")
    assert differences(plain, again) == set()


def draw_twice(tensor):
    """Numbers of the default state and of the tensor-parallel one, times tensor [n]."""
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(tensor.shape, dtype=tensor.dtype)
    return tensor * torch.rand(tensor.shape, dtype=tensor.dtype) * tracked


def state_bytes():
    state = DeviceRngState(torch.device("cpu"))
    return [state._state, *state._tracked.values()]


def test_second_pass_draws_the_numbers_of_the_first_and_leaves_the_states_alone():
    model_parallel_cuda_manual_seed(7, device="cpu")
    x = normal(64).requires_grad_()
    output = checkpoint(draw_twice, x)
    torch.rand(3)  # what other layers draw in between
    before = state_bytes()
    output.sum().backward()
    torch.testing.assert_close(x.grad * x, output, rtol=1e-14, atol=0)
    assert all(map(torch.equal, before, state_bytes()))


def test_second_pass_defers_to_the_queue_of_the_first():
    seen = []

    def part(tensor):
        seen.append(active_queue())
        return tensor * 2

    first, second = WgradQueue(), WgradQueue()
    with deferring(first):
        output = checkpoint(part, X.clone().requires_grad_())
    with deferring(second):
        output.sum().backward()
    assert seen == [first, first]


def test_forgotten_result_is_made_once_for_all_its_users_and_dropped():
    x, calls = X.clone().requires_grad_(), []

    def double():
        calls.append(len(calls))
        return x.detach() * 2

    doubled = x * 2
    with watch_storages(x) as kept, recomputed_on_use(doubled, double):
        output = (doubled.square() + doubled.exp()).sum()
    del doubled
    output.backward()
    assert calls == [0]
    torch.testing.assert_close(x.grad, 2 * (2 * (2 * x) + (2 * x).exp()))
    assert HIDDEN not in kept()


def test_without_gradients_a_part_runs_plainly():
    calls = []
    part = functools.partial(lambda tensor, note: note.append(tensor.requires_grad) or tensor * 2, note=calls)
    with torch.no_grad():
        checkpoint(part, X.clone().requires_grad_())
    assert torch.equal(checkpoint(part, X), X * 2)
    assert calls == [True, False]
