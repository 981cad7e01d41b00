"""Rotary position embedding: pairs of a head's channels are turned by an angle that grows with the position.

    (a, b) -> (a cos - b sin, b cos + a sin)           gradients are turned back, by the negative angle

A pair is channel i and i + d/2 (halves), or channel 2i and 2i + 1 (interleaved). Only the first d channels of a head
are turned, the others pass.

The plain form multiplies and adds in the dtype of the heads, rounding each time. On a GPU one kernel each for forward
and backward computes in fp32 from the same tables and rounds once; it reads any strides and writes a contiguous result.

`load_pairs`, `turn` and `store_pairs` are the parts of it, for other kernels to call.

Legend: s sequence, b batch, n heads, c channels of a head, d turned channels; H heads of a tile.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.fused_row_layout import uses_kernels
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

TILE, WARPS = 2048, 4
"""Channels that one program holds, those of several heads, and its warps."""


@dataclass(frozen=True)
class RotaryTables:
    """cos and sin of all angles in the dtype of the queries, each [s, 1, 1, d]; a pair's channels share an angle."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def from_angles(cls, angles: torch.Tensor, dtype: torch.dtype) -> "RotaryTables":
        """Build both tables from angles [s, 1, 1, d]; they are rounded to `dtype` at the end only."""
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rotary(t: torch.Tensor, tables: RotaryTables, interleaved: bool = False, fuses: bool = True) -> torch.Tensor:
    """Turn the first d channels of each head; `fuses` lets the kernel do it where there is one.

    Shapes: t [s, b, n, c] -> [s, b, n, c].
    Graph:  capturable.
    Memory: keeps the tables; the plain form also keeps what it multiplied.
    """
    if fuses and has_rotary_kernel(t, tables):
        return _FusedRotary.apply(t, tables.cos, tables.sin, interleaved)
    turned_size = tables.cos.shape[-1]
    if turned_size == t.shape[-1]:
        return _turn(t, tables, interleaved)
    turned, passed = t[..., :turned_size], t[..., turned_size:]
    return torch.cat((_turn(turned, tables, interleaved), passed), dim=-1)


def _turn(t: torch.Tensor, tables: RotaryTables, interleaved: bool) -> torch.Tensor:
    if interleaved:
        pairs = t.unflatten(-1, (-1, 2))
        partner = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        first, second = t.chunk(2, dim=-1)
        partner = torch.cat((-second, first), dim=-1)
    return torch.addcmul(t * tables.cos, partner, tables.sin)


def has_rotary_kernel(t: torch.Tensor, tables: RotaryTables) -> bool:
    """True if kernels turn t [s, b, n, c]: on a GPU, nothing in fp64, one row of the tables for each position."""
    is_double = torch.float64 in (t.dtype, tables.cos.dtype)
    return uses_kernels(t) and not is_double and tables.cos.shape[:-1] == (t.shape[0], 1, 1)


class _FusedRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return kernel_rotary(t, RotaryTables(cos, sin), interleaved)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return kernel_rotary(grad, RotaryTables(*ctx.saved_tensors), ctx.interleaved, backward=True), None, None, None


def kernel_rotary(
    t: torch.Tensor, tables: RotaryTables, interleaved: bool = False, *, backward: bool = False
) -> torch.Tensor:
    """The kernel: t [s, b, n, c] -> [s, b, n, c], turned by the angles or, with `backward`, by the negative ones."""
    t = t if t.stride(-1) == 1 else t.contiguous()
    cos, sin = tables.cos.contiguous(), tables.sin.contiguous()
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    if out.numel():
        sizes = PairSizes(cos.shape[-1] // 2, t.shape[-1] - cos.shape[-1], TILE)
        num_heads = out.numel() // t.shape[-1]
        streams.declare("rotary embedding", (t, cos, sin), (out,))
        _rotary_kernel[(-(-num_heads // sizes.heads),)](
            t,
            cos,
            sin,
            out,
            num_heads,
            t.shape[1],
            t.shape[2],
            *t.stride()[:3],
            **sizes.arguments(),
            interleaved=interleaved,
            backward=backward,
            interpreted=is_interpreted(),
            num_warps=WARPS,
        )
    return out


@dataclass(frozen=True)
class PairSizes:
    """How heads of c channels, d of them turned, lie in the tiles of a kernel."""

    num_pairs: int
    """d / 2"""

    num_rest: int
    """c - d"""

    tile: int
    """Channels of all heads of a tile, at least one head."""

    @property
    def pairs(self) -> int:
        """Columns of a tile of pairs, a power of two."""
        return 1 << (self.num_pairs - 1).bit_length() if self.num_pairs else 1

    @property
    def rest(self) -> int:
        """Columns of a tile of channels that pass, a power of two; 0 if there are none."""
        return 1 << (self.num_rest - 1).bit_length() if self.num_rest else 0

    @property
    def heads(self) -> int:
        """H"""
        return max(1, self.tile // (1 << (2 * self.pairs + self.rest - 1).bit_length()))

    def arguments(self) -> dict[str, int]:
        """The arguments of a kernel that say this."""
        sizes = {"heads": self.heads, "pairs": self.pairs, "rest": self.rest}
        return {"num_pairs": self.num_pairs, "num_rest": self.num_rest, **sizes}


@triton_jit
def load_pairs(
    place,
    mask,
    num_pairs,
    pairs: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Both channels of each pair in fp32, [H, pairs] each, from the first channels of heads, place [H]."""
    if interleaved:
        channel = tl.arange(0, 2 * pairs)
        inside = mask[:, None] & (channel < 2 * num_pairs)[None, :]
        both = tl.load(place[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [place.shape[0], pairs, 2]))
    else:
        channel = tl.arange(0, pairs)
        inside = mask[:, None] & (channel < num_pairs)[None, :]
        first = tl.load(place[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(place[:, None] + (num_pairs + channel)[None, :], mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton_jit
def store_pairs(
    place,
    first,
    second,
    mask,
    num_pairs,
    pairs: tl.constexpr,
    interleaved: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Round both channels of each pair, fp32 [H, pairs] each, and store them to heads, place [H]."""
    if interleaved:
        channel = tl.arange(0, 2 * pairs)
        inside = mask[:, None] & (channel < 2 * num_pairs)[None, :]
        both = tl.reshape(tl.join(first, second), [place.shape[0], 2 * pairs])
        tl.store(place[:, None] + channel[None, :], narrow(both, place.dtype.element_ty, interpreted), mask=inside)
    else:
        channel = tl.arange(0, pairs)
        inside = mask[:, None] & (channel < num_pairs)[None, :]
        target = place[:, None] + channel[None, :]
        tl.store(target, narrow(first, place.dtype.element_ty, interpreted), mask=inside)
        target = place[:, None] + (num_pairs + channel)[None, :]
        tl.store(target, narrow(second, place.dtype.element_ty, interpreted), mask=inside)


@triton_jit
def turn(
    first,
    second,
    cos,
    sin,
    position,
    mask,
    num_pairs,
    pairs: tl.constexpr,
    interleaved: tl.constexpr,
    backward: tl.constexpr,
):
    """Turn pairs, fp32 [H, pairs] each, by the angles of their positions [H], or back by them."""
    row = position.to(tl.int64) * (2 * num_pairs)
    cos_of, _ = load_pairs(cos + row, mask, num_pairs, pairs, interleaved)
    sin_of, _ = load_pairs(sin + row, mask, num_pairs, pairs, interleaved)
    if backward:
        sin_of = -sin_of
    return first * cos_of - second * sin_of, second * cos_of + first * sin_of


@triton_jit
def _rotary_kernel(
    t,
    cos,
    sin,
    out,
    num_heads,
    num_batch,
    num_each,
    position_stride,
    batch_stride,
    head_stride,
    num_pairs,
    num_rest,
    heads: tl.constexpr,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    interleaved: tl.constexpr,
    backward: tl.constexpr,
    interpreted: tl.constexpr,
):
    """A tile of heads of t [s, b, n, c]; tables [s, d]; out [s, b, n, c] is contiguous."""
    head = tl.program_id(0) * heads + tl.arange(0, heads)
    mask = head < num_heads
    position, batch = head // (num_batch * num_each), (head // num_each) % num_batch
    place = position.to(tl.int64) * position_stride + batch.to(tl.int64) * batch_stride
    source = t + place + (head % num_each).to(tl.int64) * head_stride
    target = out + head.to(tl.int64) * (2 * num_pairs + num_rest)
    first, second = load_pairs(source, mask, num_pairs, pairs, interleaved)
    first, second = turn(first, second, cos, sin, position, mask, num_pairs, pairs, interleaved, backward)
    store_pairs(target, first, second, mask, num_pairs, pairs, interleaved, interpreted)
    if rest > 0:
        channel = tl.arange(0, rest)
        inside = mask[:, None] & (channel < num_rest)[None, :]
        passed = tl.load(source[:, None] + (2 * num_pairs + channel)[None, :], mask=inside)
        tl.store(target[:, None] + (2 * num_pairs + channel)[None, :], passed, mask=inside)
