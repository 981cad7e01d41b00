"""Whoever launches a Triton kernel says what it touches, and that is what it touches."""

import ast
from pathlib import Path

import pytest
import torch

import megatron
from megatron.core import streams
from megatron.core.fusions.fused_permute import kernel_gather, kernel_spread, kernel_sum
from megatron.core.fusions.fused_row_layout import Sizes, kernel_layout
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_routing import number_rows
from tests.common.launch_watch import LaunchWatch
from tests.common.moe_layers import normal
from tests.unit_tests.core.fp8 import test_kernel_operand as operands
from tests.unit_tests.core.fusions import test_fp8_grouped_gemm as products
from tests.unit_tests.core.fusions import test_fused_qkv_heads as heads
from tests.unit_tests.core.fusions import test_fused_rope as rotary
from tests.unit_tests.core.fusions import test_fused_swiglu as swiglu
from tests.unit_tests.core.fusions import test_grouped_wgrad as wgrad

ROOT = Path(megatron.__path__[0]) / "core"


def launches_and_declarations(function: ast.AST) -> tuple[int, int]:
    """Number of `kernel[grid](...)` and of `streams.declare(...)` in a function."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    launched = [
        f for f in calls if isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name) and "kernel" in f.value.id
    ]
    return len(launched), sum(ast.unparse(f) == "streams.declare" for f in calls)


def test_every_launch_is_declared():
    total, missing = 0, []
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "kernel[" in text else ():
            if isinstance(node, ast.FunctionDef):
                launched, declared = launches_and_declarations(node)
                total += launched
                if launched != declared:
                    missing.append(f"{path.relative_to(ROOT)}: {node.name} launches {launched}, declares {declared}")
    assert not missing, "\n".join(missing)
    assert total >= 21


def watched_job(kind):
    with LaunchWatch() as watch:
        LAUNCHES[kind]()
    return watch.findings, watch.names


def permute():
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1]], dtype=torch.int32)
    tokens, probs = normal(3, 4).float(), normal(3, 2, seed=1).float()
    layout = kernel_layout(ids, 2, Sizes(8, 4), False)
    kernel_gather(tokens, probs, layout.pairs, 2)
    rows, row_probs = kernel_spread(tokens, probs, layout)
    kernel_sum(rows, row_probs, layout.slots, torch.float32)


def quantise():
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        operands.activation_job(recipe, "e4m3", operands.COUNTS[0], torch.float32)
        operands.weight_job(recipe, (2, 32, 48))
    operands.delayed_job(operands.COUNTS[0], None, 0.0)


def multiply():
    for recipe in ("rowwise", "blockwise"):
        products.rows_job(recipe, (128, 0, 128), False)
        products.wgrad_job(recipe, (128, 0, 128), False)


def elementwise():
    swiglu.kernels_job([swiglu.operands(3, 16, torch.float32, has_bias=True)])
    heads.heads_job([heads.problem((3, 1, 2, 2, 8, 8), torch.float32)])
    rotary.rotary_job([(rotary.T.float(), rotary.RotaryEmbedding(8).get_tables(6, torch.float32, "cpu"), False)])


def silent():
    """Declarations of the wrong direction, an operand left out, and none at all."""
    from megatron.core.fusions.fused_permute import _gather_kernel

    tokens, pairs, rows = normal(3, 16).float(), torch.tensor([0, 1, 2], dtype=torch.int32), normal(3, 16).float()
    wrong_ways = ((rows, pairs), (tokens,)), ((pairs,), (tokens, rows))
    for declared in (*wrong_ways, ((tokens,), (rows,)), None):
        if declared is not None:
            streams.declare("gather", *declared)
        _gather_kernel[(3, 1)](tokens, None, pairs, rows, None, 16, 16, 1, 16)


LAUNCHES = {
    "permute": permute,
    "wgrad": lambda: wgrad.kernel_job((5, 0, 35, 0), wgrad.SMALL),
    "routing": lambda: number_rows(torch.tensor([[0, 3], [1, -1], [2, 3]], dtype=torch.int32), 4),
    "quantise": quantise,
    "multiply": multiply,
    "elementwise": elementwise,
    "silent": silent,
}
KERNELS = {
    "permute": {"_count_kernel", "_place_kernel", "_gather_kernel", "_clear_kernel", "_spread_kernel", "_sum_kernel"},
    "wgrad": {"_grouped_wgrad_kernel"},
    "routing": {"count_kernel", "prefix_kernel", "place_kernel"},
    "quantise": {"_matrix_kernel", "_cast_kernel"},
    "multiply": {"_rows_kernel", "_wgrad_kernel"},
    "elementwise": {
        "_forward_kernel",
        "_backward_kernel",
        "_rotary_kernel",
        "_heads_kernel",
        "_heads_backward_kernel",
    },
}


@pytest.mark.parametrize(
    "kind", ["routing", *(pytest.param(kind, marks=pytest.mark.full) for kind in KERNELS if kind != "routing")]
)
def test_kernels_touch_what_is_declared(interpreted, kind):
    findings, names = interpreted(watched_job, kind)
    assert findings == []
    assert KERNELS[kind] <= set(names)


@pytest.mark.full
def test_wrong_declarations_are_seen(interpreted):
    findings, _ = interpreted(watched_job, "silent")
    text = "\n".join(findings)
    assert "_gather_kernel: writes what it is said to read" in text
    assert "_gather_kernel: reads what it is said to write" in text
    assert "_gather_kernel: an operand is not declared" in text
    assert "_gather_kernel: not declared" in text
