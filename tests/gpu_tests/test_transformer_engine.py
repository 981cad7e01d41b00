"""Transformer Engine itself behind the layers of this tree: layers beside `local`, FP8, delayed gradients, checkpoints.

    PYTHONPATH=/where/it/is NVTE_FRAMEWORK=pytorch python3 tests/gpu_tests/run.py --only te

Bounds in bf16 are rounding bounds of a few layers, measured relative to the norm of a tensor: 2^-8 for each of some
tens of roundings that add up like noise.
"""

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core import graph_state
from megatron.core.deferred_wgrad import WgradQueue, deferring
from megatron.core.extensions.transformer_engine.module import EngineLayer
from megatron.core.extensions.transformer_engine.optimizer import EngineAdam
from megatron.core.extensions.transformer_engine.probe import FEATURES, load_library
from megatron.core.fp8.layer_state import GRADIENT, INPUT, WEIGHT, forget_weight_codes
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer.precision_aware_adam import PrecisionAwareAdam
from megatron.core.optional_deps import is_available
from megatron.core.transformer import TransformerConfig
from tests.common import overlapped_model
from tests.common.engine_runs import local_name
from tests.common.fake_te_signatures import TEXTS, VERSION, signature_of
from tests.common.training_runs import fresh_program, train
from tools.run_metrics import parse_log

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and not is_available("transformer_engine"), reason="Transformer Engine is absent"
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, LENGTH, BATCH = 512, 128, 2
RECIPES = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "blockwise hybrid": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
}
PRECISIONS = {"bf16": {}, **RECIPES}
KINDS = {
    "dense": {},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 256, "moe_grouped_gemm": True},
    "in sequence": {"num_moe_experts": 4, "moe_ffn_hidden_size": 256, "moe_grouped_gemm": False},
}
LOSS_BOUND, GRAD_BOUND = 5e-3, 5e-2
NO_ROUNDING_OF_SUMS = 1e-5  # fp32 sums of the same products in another order


def config_of(kind="dense", **fields):
    defaults = {
        "num_layers": 2,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "device": DEVICE,
    }
    return TransformerConfig(**{**defaults, **KINDS[kind], **fields})


def model_of(config, is_engine=True):
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=is_engine)
    return GPTModel(config, spec, VOCAB, LENGTH, position_embedding_type="rope").to(DEVICE)


def batch_of(seed=0):
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return (
        tokens[:, :-1].contiguous(),
        torch.arange(LENGTH, device=DEVICE).expand(BATCH, -1),
        tokens[:, 1:].contiguous(),
    )


def loss_of(model, seed=0):
    tokens, positions, labels = batch_of(seed)
    return model(tokens, positions, None, labels=labels).float().mean()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def trained(model, steps=20):
    """Losses of steps of Adam on one batch; the amaxes of delayed scaling advance as in a training run."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        forget_weight_codes([model])
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        for module in model.modules():
            if getattr(module, "amax_history", None) is not None:
                module.apply_step_amaxes(module.step_amaxes())
        losses.append(loss.item())
    return losses


def give_main_grads(module):
    for param in module.parameters():
        param.main_grad = torch.zeros(param.shape, dtype=torch.float32, device=DEVICE)


# ---- the library -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TEXTS)
def test_signature_is_that_of_the_stand_in(name):
    library = load_library()
    if library.version.split("+")[0] != VERSION:
        pytest.skip(f"the table is of {VERSION}, this is {library.version}")
    want, got = signature_of(name), inspect.signature(library.get(name))
    found = [param for param in got.parameters.values() if param.name != "self"]
    assert [param.name for param in found] == list(want.parameters)
    if not name.startswith("common.recipe."):
        assert [param.default for param in found] == [param.default for param in want.parameters.values()]


def test_every_feature_of_the_table_is_seen():
    library = load_library()
    print(f"Transformer Engine {library.version}")
    assert [name for name in FEATURES if not library.has(name)] == []


# ---- layers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_local(kind):
    config, found = config_of(kind), {}
    for is_engine in (False, True):
        model = model_of(config, is_engine)
        loss = loss_of(model)
        loss.backward()
        found[is_engine] = loss.item(), {local_name(name): param.grad for name, param in model.named_parameters()}
    (want, grads), (got, engine_grads) = found[False], found[True]
    differences = {name: relative(engine_grads[name], grad) for name, grad in grads.items()}
    print(f"{kind}: loss {want:.5f} and {got:.5f}, largest difference of a gradient {max(differences.values()):.2e}")
    assert abs(got - want) < LOSS_BOUND * want
    # a router's choice may turn on the last bit: compared where it cannot
    assert all(value < GRAD_BOUND for name, value in differences.items() if kind == "dense" or "attention" in name)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("is_centered", [False, True])
def test_norms_and_biases_are_those_of_local(norm, is_centered):
    config = config_of(normalization=norm, layernorm_zero_centered_gamma=is_centered, add_bias_linear=True)
    want, got = (loss_of(model_of(config, is_engine)).item() for is_engine in (False, True))
    assert abs(got - want) < LOSS_BOUND * want


def test_attention_with_a_mask_is_that_of_local():
    config = config_of()
    want, got = (model_of(config, on).decoder.layers[0].self_attention.core_attention for on in (False, True))
    heads = [normal(LENGTH, BATCH, n, 64, seed=n + i) for i, n in enumerate((4, 2, 2))]
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE)
    mask[..., 64:, :32] = True
    for given in (None, mask):
        assert relative(got(*heads, given), want(*heads, given)) < 2e-2


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("counts", [[0, 128, 0, 64], [192, 0, 0, 0], [0, 0, 0, 0]], ids=str)
def test_experts_without_rows_get_gradients_of_zero(counts, precision):
    experts = model_of(config_of("experts", **PRECISIONS[precision])).decoder.layers[0].mlp.experts
    rows = normal(192, 256).requires_grad_()
    output, _ = experts(rows, torch.tensor(counts, device=DEVICE), torch.ones(192, device=DEVICE))
    output.sum().backward()
    for count, weight in zip(counts, experts.linear_fc1.weights, strict=True):
        assert weight.grad.isfinite().all()
        assert bool(weight.grad.abs().sum() > 0) == (count > 0)
    assert output[sum(counts) :].eq(0).all()
    assert rows.grad[sum(counts) :].eq(0).all()


# ---- FP8 -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_trains_as_bf16_does(kind, recipe):
    want = trained(model_of(config_of(kind)))
    got = trained(model_of(config_of(kind, **RECIPES[recipe])))
    print(f"{kind} {recipe}: bf16 {want[0]:.4f} to {want[-1]:.4f}, FP8 {got[0]:.4f} to {got[-1]:.4f}")
    assert want[-1] < want[0] - 1.0
    assert got[-1] < got[0] - 0.8 * (want[0] - want[-1])


def test_amaxes_of_a_step_cover_its_microbatches_and_scale_the_next():
    layer = model_of(config_of(fp8="hybrid", fp8_recipe="delayed")).decoder.layers[0].mlp.linear_fc2
    for size in (2.0, 7.0, 3.0):
        rows = torch.full((16, 512), size, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        layer(rows)[0].backward(torch.full((16, 256), size / 4, dtype=torch.bfloat16, device=DEVICE))
    found = layer.fp8.step_amaxes().clone()
    assert found[[INPUT, GRADIENT]].tolist() == [7.0, 1.75]
    assert found[WEIGHT] == layer.weight.abs().amax()
    layer.fp8.apply_step_amaxes(found)
    layer.fp8.forget_weight()
    layer(rows)
    assert layer.engine.fp8_meta["scaling_fwd"].scale[0] == 448 / 7.0
    assert layer.engine.fp8_meta["scaling_bwd"].scale[0] == 57344 / 1.75


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_of_experts_stay_exactly_if_they_are_declared_as_kept(precision):
    experts = model_of(config_of("experts", **PRECISIONS[precision])).decoder.layers[0].mlp.experts
    experts.given_row_multiple = 128
    leaf = normal(512, 256).requires_grad_()
    rows = leaf * 2
    kept = StorageWeakRef(rows.untyped_storage())
    output = experts(rows, torch.tensor([128, 0, 256, 128], device=DEVICE), torch.ones(512, device=DEVICE))
    del rows
    assert kept.expired() != experts.saves_rows
    output[0].sum().backward()
    assert leaf.grad.isfinite().all()


# ---- weight gradients ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_delayed_weight_gradients_are_the_same(kind, precision):
    found = []
    for delays in (False, True):
        config = config_of(kind, **PRECISIONS[precision])
        config.delay_wgrad_compute = delays
        model, queues = model_of(config), []
        give_main_grads(model)
        for seed in range(3):
            queues.append(WgradQueue())
            with deferring(queues[-1] if delays else None):
                loss = loss_of(model, seed)
            loss.backward()
        early = {name: param.main_grad.clone() for name, param in model.named_parameters()}
        assert sum(len(queue) for queue in queues) > 0 or not delays
        for queue in queues:
            queue.flush()
        found.append({name: param.main_grad for name, param in model.named_parameters()})
    assert any(not torch.equal(early[name], grad) for name, grad in found[1].items())
    differing = [name for name, grad in found[0].items() if relative(found[1][name], grad) > NO_ROUNDING_OF_SUMS]
    assert differing == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hiding_an_exchange_and_delaying_weight_gradients_change_no_bit(monkeypatch, precision):
    def deferrable(config):
        config.delay_wgrad_compute = True
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)

    deferred, run_deferred = [], EngineLayer._run_deferred
    monkeypatch.setattr(EngineLayer, "_run_deferred", lambda layer: (deferred.append(layer), run_deferred(layer)))
    monkeypatch.setattr(overlapped_model, "get_gpt_decoder_block_spec", deferrable)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        sizes = {"hidden_size": 256, "ffn_hidden_size": 256, "num_attention_heads": 4, "bf16": True}
        sizes |= PRECISIONS[precision]
        model = overlapped_model.overlapped_model(is_shuffled=True, device=DEVICE, **sizes)
        found = []
        for overlap, delays in ((False, False), (False, False), (True, False), (True, True)):
            give_main_grads(model)
            assert not deferred, "a weight gradient was put off unasked"
            overlapped_model.run_step(model, overlapped_model.make_batches([64, 32, 64], DEVICE), overlap, delays)
            pairs = {name: (param.main_grad, param.grad) for name, param in model.named_parameters()}
            found.append({name: (a if b is None else a + b).clone() for name, (a, b) in pairs.items()})
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(deferred) == 3 * 2 * 4  # microbatches, layers, matrices
    plain, again, overlapped, delayed = found
    overlapped_model.assert_equal_bits(plain, again)  # else the kernels do not repeat
    overlapped_model.assert_equal_bits(plain, overlapped)
    overlapped_model.assert_equal_bits(plain, delayed)
    assert all(grad.abs().sum() > 0 for name, grad in plain.items() if "experts" in name)


def test_times_of_experts_are_printed():
    """Forward and backward of 8 experts with 1024 rows each, 2048 wide, both implementations; nothing is asserted."""
    for precision, fields in PRECISIONS.items():
        found = []
        for is_engine in (False, True):
            sizes = {"hidden_size": 2048, "moe_ffn_hidden_size": 1408, "num_moe_experts": 8, "num_layers": 1}
            experts = model_of(config_of("experts", **sizes, **fields), is_engine).decoder.layers[0].mlp.experts
            give_main_grads(experts)
            experts.given_row_multiple = 128
            rows, probs = normal(8192, 2048).requires_grad_(), torch.ones(8192, device=DEVICE)
            counts, host_counts = torch.full((8,), 1024, device=DEVICE), [1024] * 8
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for step in range(13):
                if step == 3:
                    begin.record()
                experts(rows, counts, probs, host_counts)[0].backward(rows.detach())
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 10)
        print(f"{precision}: local {found[0]:.3f} ms, Transformer Engine {found[1]:.3f} ms")


# ---- optimizer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_updates_are_those_of_our_adam_and_a_raised_guard_changes_nothing(moments):
    found = []
    for build in (PrecisionAwareAdam, functools.partial(EngineAdam, moment_dtypes=(moments, moments))):
        params = [torch.nn.Parameter(normal(n, seed=n).float()) for n in (7, 4099)]
        rates = [torch.tensor(rate, device=DEVICE) for rate in (0.1, 0.2)]
        groups = [{"params": [p], "lr": rate, "weight_decay": 0.1} for p, rate in zip(params, rates, strict=True)]
        optimizer = build([*groups, {"params": [], "lr": rates[0], "weight_decay": 0.0}], (0.9, 0.95), 1e-8, True)
        for param in params:
            zeros = {name: torch.zeros_like(param, dtype=moments) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {**zeros, "step": torch.zeros((), device=DEVICE)}
        for number, guard in enumerate((0.0, 0.0, 1.0, 0.0)):
            for param in params:
                param.decoupled_grad = normal(*param.shape, seed=100 + number).float()
            optimizer.found_inf = torch.tensor(guard, device=DEVICE)
            optimizer.step()
        kept = [optimizer.state[param][name].float() for param in params for name in ("exp_avg", "exp_avg_sq", "step")]
        found.append([param.detach() for param in params] + kept)
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5 if moments is torch.float32 else 2**-7, atol=1e-6)


# ---- runs ------------------------------------------------------------------------------------------------------------
MODEL = (
    "--device cuda --bf16 --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-router-dtype fp32 "
    "--moe-grouped-gemm --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --micro-batch-size 4 "
    "--global-batch-size 16 --lr 2e-3 --lr-warmup-iters 4 --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 500 --mock-data --num-workers 0 --log-interval 1 --eval-iters 2 "
    "--use-distributed-optimizer "
)
ENGINE, LOCAL = "--transformer-impl transformer_engine ", "--transformer-impl local "
DROP_PAD = "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity "


@pytest.fixture
def losses(capfd):
    """Run pretrain_gpt.py with flags in this process; returns the loss of each step."""

    def run(flags):
        with fresh_program():
            train(MODEL + flags)
        return parse_log("".join(capfd.readouterr()))["lm loss"]

    return run


def assert_close_curves(got, want, bound=1e-2):
    assert got.keys() == want.keys()
    differences = {step: abs(got[step] - value) / value for step, value in want.items()}
    print(f"largest relative difference of {len(want)} losses {max(differences.values()):.2e}")
    assert max(differences.values()) < bound


@pytest.mark.parametrize(("saver", "loader"), [(ENGINE, LOCAL), (LOCAL, ENGINE)], ids=["to local", "to the engine"])
def test_checkpoint_goes_on_in_the_other_implementation(losses, tmp_path, saver, loader):
    straight = losses(f"{saver}--train-iters 12 ")
    losses(f"{saver}--train-iters 12 --save {tmp_path} --save-interval 6 --exit-interval 6 ")
    resumed = losses(f"{loader}--train-iters 12 --load {tmp_path} ")
    assert_close_curves(resumed, {step: loss for step, loss in straight.items() if step > 6})


@pytest.mark.parametrize(
    "fp8", ["", "--fp8-format hybrid --fp8-recipe delayed ", "--fp8-format e4m3 --fp8-recipe blockwise "]
)
def test_captured_steps_are_those_of_eager_ones(losses, fp8):
    flags = f"{ENGINE}{DROP_PAD}{fp8}--use-precision-aware-optimizer --train-iters 12 "
    eager = losses(flags)
    graph = losses(f"{flags}--cuda-graph-impl full_iteration ")
    assert graph_state.num_graphs() == 0
    assert_close_curves(graph, eager)
