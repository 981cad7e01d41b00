"""The weight gradient with specialised warps: its fills, barriers and windows in a model, and that it compiles."""

import pytest
import torch

from megatron.core.fusions import ring_wgrad
from megatron.core.fusions.ring_wgrad import RingCut, can_run_ring
from tests.common import gluon_model
from tests.common.gluon_model import Descriptor, Pointer
from tests.common.moe_layers import normal

OUT, IN, SPARE = 144, 272, 32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operand(features, counts, dtype, seed):
    """[R, features], of codes transposed; what lies behind the last expert is NaN."""
    values = torch.cat([normal(sum(counts), features, seed=seed), torch.full((SPARE, features), torch.nan)])
    return (values.t() if dtype.itemsize == 1 else values).contiguous().to(dtype)


def run_model(monkeypatch, main, grad, rows, scales, ends, cut, num_programs=3):
    monkeypatch.setattr(ring_wgrad, "_described", lambda t, sizes, strides, block: Descriptor(t, sizes, strides, block))
    has_codes = scales is not None
    block = ring_wgrad._BLOCK_BYTES // grad.element_size()
    describe = ring_wgrad._code_windows if has_codes else ring_wgrad._row_windows
    count, outs, ins = main.shape
    left_scale, right_scale = scales or (main, main)
    pointers = [Pointer(part) for part in (main, left_scale, right_scale, ends)]
    main_desc = Descriptor(main, list(main.shape), list(main.stride()), [1, 64, 128])
    constants = {"SIDE": 128, "BLOCK": block, "CONSUMERS": cut.consumers, "SLOTS": cut.slots, "BAND": cut.band}
    constants |= {"NUM_TURNS": 8, "NUM_PROGRAMS": num_programs, "HAS_CODES": has_codes}
    numbers = (count, outs, ins, main.stride(0), 0)
    descs = (describe(grad, block), describe(rows, block), main_desc)
    gluon_model.run_kernel(ring_wgrad, "_ring_kernel", num_programs, *descs, *pointers, *numbers, **constants)


def expected(main, left, right, scales, ends):
    """In fp64, from the operands as they are."""
    wanted, begin = main.double(), 0
    for expert, end in enumerate(ends.tolist()):
        if scales is None:
            a, b = left[begin:end].double(), right[begin:end].double()
        else:
            a, b = (
                (x[:, begin:end].double() * s[expert, :, None]).t() for x, s in zip((left, right), scales, strict=True)
            )
        wanted[expert] += a.t() @ b
        begin = end
    return wanted


CUTS = {
    "one": RingCut(slots=3),
    "two": RingCut(2, slots=4, band=1),
    "few": RingCut(2, slots=2),
    "pair": RingCut(slots=2),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("counts", [(16, 0, 208, 0, 64), (0, 0)], ids=str)
def test_ring_adds_each_group_and_nothing_else(monkeypatch, counts, dtype, cut):
    left, right = operand(OUT, counts, dtype, 1), operand(IN, counts, E4M3 if dtype is E5M2 else dtype, 2)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    main = normal(len(counts), OUT, IN, seed=3).float()
    scales = None
    if dtype.itemsize == 1:
        scales = tuple(normal(len(counts), size, seed=4).float() for size in (OUT, IN))
    before, wanted = main.clone(), expected(main, left, right, scales, ends)
    run_model(monkeypatch, main, left, right, scales, ends, cut)
    torch.testing.assert_close(main.double(), wanted, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(main[i], before[i]) for i, size in enumerate(counts) if size == 0)


def test_rows_of_any_number_are_summed(monkeypatch):
    counts = (5, 0, 131, 1)
    left, right = operand(OUT, counts, torch.bfloat16, 1), operand(IN, counts, torch.bfloat16, 2)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    main = normal(len(counts), OUT, IN, seed=3).float()
    wanted = expected(main, left, right, None, ends)
    run_model(monkeypatch, main, left, right, None, ends, CUTS["two"])
    torch.testing.assert_close(main.double(), wanted, rtol=1e-5, atol=1e-4)


def test_the_ring_is_for_a_gpu():
    assert not can_run_ring(normal(2, OUT, IN).float())


def built(dtype, other, consumers, slots):
    """The kernel as it is launched on an H200."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    has_codes = dtype.startswith("fp8")
    block, bits = ([128, 1, 128], 8) if has_codes else ([1, 64, 128], 16)
    constants = {"SIDE": 128, "BLOCK": 1024 // bits, "CONSUMERS": consumers, "SLOTS": slots, "BAND": 8, "NUM_TURNS": 8}
    constants |= {"NUM_PROGRAMS": 264, "HAS_CODES": has_codes}
    types = {
        "grad_desc": f"tensordesc<{dtype}{block},{gl.NVMMASharedLayout(128, bits, rank=3)!r}>",
        "rows_desc": f"tensordesc<{other}{block},{gl.NVMMASharedLayout(128, bits, rank=3)!r}>",
        "main_desc": f"tensordesc<fp32[1, 64, 128],{gl.NVMMASharedLayout(128, 32, rank=3)!r}>",
        "ends_ptr": "*i32",
    }
    types |= dict.fromkeys(("main_ptr", "left_scale", "right_scale"), "*fp32")
    names = ring_wgrad._ring_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = GluonASTSource(
        ring_wgrad._ring_kernel, signature, {(names.index(name),): value for name, value in constants.items()}
    )
    options = {"num_warps": 4, "maxnreg": ring_wgrad.REGISTERS[consumers]}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("dtype", "other", "consumers", "slots"),
    [
        ("bf16", "bf16", 1, 3),
        pytest.param("fp16", "fp16", 2, 4, marks=pytest.mark.full),
        pytest.param("fp8e4nv", "fp8e4nv", 1, 3, marks=pytest.mark.full),
        pytest.param("fp8e5", "fp8e4nv", 2, 4, marks=pytest.mark.full),
    ],
)
def test_kernel_compiles_for_hopper_and_fits_an_sm(dtype, other, consumers, slots):
    kernel = built(dtype, other, consumers, slots)
    ptx = kernel.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 8 * consumers
    assert "setmaxnreg.inc.sync.aligned.u32 \t232" in ptx or consumers == 2
    programs = 2 // consumers
    assert programs * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert programs * kernel.metadata.num_warps * 32 * ring_wgrad.REGISTERS[consumers] <= 65536
