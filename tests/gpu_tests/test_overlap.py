"""The combined schedule on real streams: equal bits, memory as declared, the four faults provoked and absent.

One GPU: the exchange is a copy on the communication stream. Delays are kernels that do nothing for a while, so that a
missing order shows every time. Two GPUs: the program, off and on, by state hash.
"""

import dataclasses
import gc
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.layer_plan import LayerPlan
from megatron.core.pipeline_parallel.overlap.nodes import StageNode
from megatron.core.pipeline_parallel.overlap.protocol import Stage
from megatron.core.pipeline_parallel.overlap.worker import OverlapWorker
from megatron.core.streams import Role
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.mutants import replaced
from tests.common.overlapped_model import (
    MAX_LENGTH,
    ShadowedExperts,
    assert_equal_bits,
    overlapped_model,
    run_microbatches,
)
from tests.common.poison import fill_with_poison
from tests.common.stream_mutants import ALL_KEPT
from tests.functional_tests.cases import find_cases, launch
from tests.unit_tests.core.pipeline_parallel.overlap.test_faults import (
    FP8,
    LENGTHS,
    inputs_overwritten,
    on_the_other_stream,
    watched_rows,
    without_hold,
)
from tools.run_metrics import parse_state_hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# some 20 ms on an H200
DELAY_CYCLES = 40_000_000
ALLOCATION_BYTES = 512
SIZES = {"hidden_size": 256, "moe_ffn_hidden_size": 256, "ffn_hidden_size": 256, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
    torch.cuda.synchronize()
    streams.reset()


def gpu_model(**fields):
    return overlapped_model(device="cuda", **{"bf16": True, **SIZES, **fields})


def delay():
    torch.cuda._sleep(DELAY_CYCLES)


@contextmanager
def delayed(stage, kind):
    """Put work in front of a stage's `kind` (forward, backward, weight_grads), on the stream of the stage."""
    original = getattr(StageNode, kind)

    def late(self, *args, **options):
        if self.name.endswith(stage.value):
            with streams.on(self.role):
                delay()
        return original(self, *args, **options)

    with replaced(StageNode, kind, late):
        yield


# Equal bits


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize(
    "dtype", [{"bf16": True}, {"bf16": False, "params_dtype": torch.float32}, FP8], ids=["bf16", "fp32", "FP8"]
)
def test_overlap_gives_the_bits_of_the_plain_schedule(is_shuffled, dtype):
    model = gpu_model(is_shuffled=is_shuffled, moe_shared_expert_intermediate_size=256, **dtype)
    plain = run_microbatches(model, 4, overlap=False)
    assert_equal_bits(plain, run_microbatches(model, 4, overlap=False))  # else nothing could be compared
    for delays_wgrad in (False, True):
        assert_equal_bits(plain, run_microbatches(model, 4, delays_wgrad=delays_wgrad))


def test_room_for_the_exchange_changes_no_bit():
    model = gpu_model(is_shuffled=True, hidden_size=1024, moe_ffn_hidden_size=1024)
    plain = run_microbatches(model, overlap=False, lengths=[MAX_LENGTH] * 3)
    seen, product = [], torch._grouped_mm

    def noted(*args, **options):
        seen.append(torch._C._get_sm_carveout_experimental())
        return product(*args, **options)

    for num_sms in (8, 16, 32):
        seen.clear()
        model.config.moe_flex_dispatcher_num_sms = num_sms
        with replaced(torch, "_grouped_mm", noted):
            assert_equal_bits(plain, run_microbatches(model, delays_wgrad=True, lengths=[MAX_LENGTH] * 3))
        assert set(seen) == {None, num_sms}  # what runs alone has the whole device


@pytest.mark.parametrize("kind", ["forward", "backward", "weight_grads"])
@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.value)
def test_late_stages_change_no_bit(stage, kind):
    model = gpu_model()
    plain = run_microbatches(model, overlap=False)
    with delayed(stage, kind):
        assert_equal_bits(plain, run_microbatches(model, delays_wgrad=True))


def comm_stream_beside(compute):
    """The communication stream of a step that begins on the stream `compute`."""
    with torch.cuda.stream(compute), streams.step(torch.device("cuda")), streams.on(Role.COMM):
        return torch.cuda.current_stream().cuda_stream


def test_roles_are_two_streams_whatever_others_take_from_the_pool():
    """torch hands out 32 streams in turn: 40 others make it begin again."""
    compute = torch.cuda.Stream()
    seen, others = set(), []
    for _ in range(40):
        others.append(torch.cuda.Stream())
        seen.add(comm_stream_beside(compute))
    assert len(seen) == 1
    assert compute.cuda_stream not in seen
    for other in others:
        assert comm_stream_beside(other) != other.cuda_stream


# F1


def wrong_gradients(model, plain, **options):
    got = run_microbatches(model, **options)
    torch.cuda.synchronize()
    return [name for name in plain if not torch.equal(plain[name], got[name])]


def test_f1_late_input_gradients_do_not_reach_the_weight_gradients():
    model = gpu_model()
    plain = run_microbatches(model, overlap=False)
    with delayed(Stage.EXPERTS, "backward"):
        assert wrong_gradients(model, plain, delays_wgrad=True) == []
        with replaced(StageNode, "weight_grads", on_the_other_stream):
            assert wrong_gradients(model, plain, delays_wgrad=True)


# F2 and F4


@pytest.mark.parametrize(
    ("fields", "fate"),
    [({"is_shuffled": False}, "kept"), ({"is_shuffled": True}, "gone"), ({"shadow": True}, "gone"), (FP8, "gone")],
    ids=["saved as they are", "sorted into a copy", "saved as bytes", "saved as FP8 codes"],
)
def test_f2_rows_go_exactly_if_autograd_did_not_save_them(fields, fate):
    with watched_rows() as fates:
        run_microbatches(gpu_model(**fields))
    assert set(fates) == {fate}
    if "shadow" in fields or "fp8" in fields:
        keeps = replaced(MoELayer, "saved_inputs", lambda self: ALL_KEPT)
        with keeps, watched_rows() as fates:
            run_microbatches(gpu_model(**fields))
        assert set(fates) == {"kept"}


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
def test_f4_what_is_let_go_is_read_by_nobody(is_shuffled):
    model = gpu_model(is_shuffled=is_shuffled)
    plain = run_microbatches(model, overlap=False)
    with inputs_overwritten():
        assert wrong_gradients(model, plain, delays_wgrad=True) == []
        if not is_shuffled:
            with replaced(MoELayer, "saved_inputs", lambda self: frozenset()):
                assert wrong_gradients(model, plain)


# F3


@contextmanager
def memory_of_comm_overwritten():
    """After a layer is closed, take free memory of the communication stream and fill it at once."""
    close = LayerPlan.close

    def then_overwrite(self):
        close(self)
        with streams.on(Role.COMM):
            blocks = [torch.empty(4, dtype=torch.int64, device="cuda") for _ in range(64)]
            for block in blocks:
                fill_with_poison(block)

    with replaced(LayerPlan, "close", then_overwrite):
        yield


def counts_read_late(close=None):
    """The counts that delayed work of each backward read, after garbage was written over free memory."""
    model = gpu_model(counts_late=True, shadow=True)
    with ExitStack() as stack:
        if close is not None:
            stack.enter_context(replaced(LayerPlan, "close", close))
        stack.enter_context(memory_of_comm_overwritten())
        stack.enter_context(delayed(Stage.EXPERTS, "weight_grads"))
        run_microbatches(model, lengths=LENGTHS, delays_wgrad=True)
    torch.cuda.synchronize()
    layers = [module for module in model.modules() if isinstance(module, ShadowedExperts)]
    return [int(counts.sum()) for layer in layers for counts in layer.counts_seen]


def test_f3_counts_live_until_the_last_stream_has_read_them():
    rows = [2 * 2 * length for length in LENGTHS]  # 2 samples, top-2
    assert sorted(counts_read_late()) == sorted(rows * 2)
    undone = counts_read_late(close=without_hold)
    print(f"counts with the hold undone: {undone}, true: {rows}")
    assert sorted(undone) != sorted(rows * 2)


# Memory


def saved_bytes(model, length):
    """What autograd keeps of one plain forward beside parameters, each storage once, in the allocator's units."""
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_cuda and storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        run_microbatches(model, 1, overlap=False, lengths=[length])
    model.zero_grad()
    gc.collect()
    return sum(found.values())


SYMM_MEM = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_hybridep_engine": "symm_mem",
}


@pytest.mark.parametrize(
    "fields",
    [{}, {"is_shuffled": True}, {"shadow": True}, SYMM_MEM],
    ids=["in order", "shuffled", "bytes", "symmetric memory"],
)
def test_microbatch_in_flight_costs_what_autograd_saved(fields):
    model = gpu_model(hidden_size=1024, moe_ffn_hidden_size=1024, **fields)
    run_microbatches(model, 2)  # workspaces
    expected = saved_bytes(model, MAX_LENGTH)
    torch.cuda.synchronize()
    before, after_forward, forward = torch.cuda.memory_allocated(), [], OverlapWorker.forward

    def watched(self, action, received):
        output = forward(self, action, received)
        streams.join()  # nothing waits for a stream any more
        after_forward.append(torch.cuda.memory_allocated() - before)
        return output

    with replaced(OverlapWorker, "forward", watched):
        run_microbatches(model, 1, lengths=[MAX_LENGTH])
    model.zero_grad()
    for layer in [module for module in model.modules() if isinstance(module, ShadowedExperts)]:
        layer.counts_seen.clear()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    print(f"in flight {after_forward[0]} bytes, saved {expected}, left after the step {left}")
    assert after_forward[0] == pytest.approx(expected, rel=0.02)
    assert left <= 64 * ALLOCATION_BYTES


# Two GPUs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_program_trains_the_same_bits_on_two_gpus(tmp_path, dispatcher):
    (case,) = find_cases(["gpt_moe/ep2_fp32"])
    common = {
        "--device": "cuda",
        "--bf16": True,
        "--deterministic-mode": True,
        "--log-state-hash": True,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": dispatcher,
        "--micro-batch-size": 2,
    }
    if dispatcher == "flex":
        common["--moe-flex-dispatcher-backend"] = "hybridep"
    overlap = {"--overlap-moe-expert-parallel-comm": True}
    hashes = {}
    for name, flags in {
        "first": {},
        "second": {},
        "overlap": overlap,
        "delayed": {**overlap, "--delay-wgrad-compute": True},
    }.items():
        args = {**case.model_args, **common, **flags}
        log = launch(dataclasses.replace(case, model_args=args, num_processes=2), tmp_path / name)
        hashes[name] = parse_state_hashes(log)
        assert ("pairs overlapped" in log) == bool(flags)
    assert hashes["first"] == hashes["second"], "not deterministic: nothing can be compared"
    assert hashes["overlap"] == hashes["first"]
    assert hashes["delayed"] == hashes["first"]
