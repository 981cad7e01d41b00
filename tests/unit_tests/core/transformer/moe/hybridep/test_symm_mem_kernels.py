"""The kernels of symm_mem compiled for a GPU without one: they must compile, and store rows in 16-byte words."""

import re

import pytest

from megatron.core.transformer.moe.dispatchers.hybridep import symm_mem_kernels as kernels
from megatron.core.transformer.moe.dispatchers.hybridep import symm_mem_routing as routing
from megatron.core.transformer.moe.dispatchers.hybridep import symm_mem_signals as signals

triton = pytest.importorskip("triton")

POINTERS = {
    **dict.fromkeys(["hidden", "rows"], "*bf16"),
    **dict.fromkeys(["probs", "row_probs"], "*fp32"),
    **dict.fromkeys(["control", "data", "tokens_per_expert", "totals"], "*i64"),
    **dict.fromkeys(["expert_ids", "places", "counts", "epoch", "slot_rows", "firsts", "headers"], "*i32"),
    **dict.fromkeys(["group_ends", "arrived", "expected", "failures", "block_counts", "before"], "*i32"),
}
CONSTANTS = {"SIZE": 2, "SIZE_PAD": 2, "EXPERTS": 8, "EXPERTS_PAD": 8, "SLOTS": 2, "SLOTS_PAD": 2, "WIDTH": 1024}
CONSTANTS |= {
    "BLOCK": 1024,
    "TILE": 2,
    "HEADERS_AT": 4,
    "OPERATION": 0,
    "UNROLL": 2,
    "MULTIPLE": 16,
    "COLUMNS": 8,
    "CHUNK": 64,
}
CONSTANTS |= {"WITH_ROUTING": True, "WITH_PROBS": True, "PACKED": False, "INTERPRETED": False}


def compile_for_hopper(kernel, num_warps=4, **changes):
    """The machine-independent assembly of a kernel, which must also assemble for the chip."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, aligned = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", {**CONSTANTS, **changes}[name]
            continue
        is_offset = name.endswith("_at") or name == "buffer_bytes"
        signature[name] = POINTERS.get(name, "i64" if is_offset else "i32")
        if name in POINTERS or name.endswith("_at"):
            aligned[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]


@pytest.mark.parametrize("name", ["push_kernel", "expand_kernel", "zero_kernel", "reduce_kernel", "add_kernel"])
def test_rows_are_stored_in_16_byte_words(name):
    text = compile_for_hopper(getattr(kernels, name))
    assert re.search(r"st\.global\.v4\.b32", text)
    assert not re.search(r"(ld|st)\.global\S*\.b16", text)


@pytest.mark.parametrize("name", ["push_kernel", "expand_kernel"])
def test_packed_rows_are_loaded_and_stored_in_wide_words(name):
    text = compile_for_hopper(getattr(kernels, name), PACKED=True)
    assert re.search(r"ld\.global\.v4\.b32", text)
    assert re.search(r"st\.global\.v[24]\.b32", text)
    assert not re.search(r"(ld|st)\.global\S*\.b(8|16)", text)
    assert "cvt.rn.satfinite.e4m3x2.f32" in text


def test_reports_are_released_and_acquired_at_system_scope():
    push, wait = compile_for_hopper(kernels.push_kernel), compile_for_hopper(signals.wait_kernel, num_warps=1)
    assert re.search(r"bar\.sync.*?atom\.global\.sys\.release\.add", push, re.DOTALL)
    assert re.search(r"ld\.global\.sys\.acquire", wait)
    assert re.search(r"st\.global.*?membar\.sys.*?bar\.sync.*?trap", wait, re.DOTALL)


@pytest.mark.parametrize("name", ["count_kernel", "place_kernel", "arrange_kernel"])
def test_routing_kernels_compile(name):
    assert ".entry" in compile_for_hopper(getattr(routing, name))
