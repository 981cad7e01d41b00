"""Modules of the stand-in for Transformer Engine: plain torch with the library's arguments, communication and queue.

It is strict where the library is: bound signatures, one dtype, row counts that cover the rows, a queue that is popped
as often as it is filled. One product, `_Product`, serves all linear modules.
"""

import dataclasses
import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.utils.upcast import upcast
from tests.common import fake_te_fp8 as fp8
from tests.common.fake_te_signatures import bound, signature_of


class WeightGradStore:
    """A module's queue of weight gradients."""

    def __init__(self, is_on: bool) -> None:
        self.waiting: list[Any] | None = [] if is_on else None
        self.enabled = is_on

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        self.enabled = False


class Bound(torch.nn.Module):
    """A module with the arguments of the library's."""

    NAME = ""
    WITHOUT: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.args = bound(self.__signature__, args, kwargs)

    def __init_subclass__(cls) -> None:
        cls.__signature__ = signature_of(cls.NAME, cls.WITHOUT) if cls.NAME else inspect.Signature()


class Module(Bound):
    """Base of the linear modules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8_meta: dict[str, Any] = {}
        self.fuse_wgrad_accumulation = self.args.fuse_wgrad_accumulation
        self.wgrad_store = WeightGradStore(getattr(self.args, "delay_wgrad_compute", False))
        self.tp_size = 1 if self.args.tp_group is None else dist.get_world_size(self.args.tp_group)
        assert not self.args.bias, "the stand-in has no bias"

    @property
    def matrices(self) -> list[torch.nn.Parameter]:
        return [param for param in self.parameters() if param.dim() == 2]

    def add_matrix(self, name: str, size_out: int, size_in: int) -> None:
        weight = torch.full((size_out, size_in), float("nan"), dtype=self.args.params_dtype, device=self.args.device)
        self.args.init_method(weight)
        self.register_parameter(name, torch.nn.Parameter(weight))
        if self.wgrad_store.enabled:
            getattr(self, name).skip_backward_post_hook = True

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        fp8.init_meta(self.fp8_meta, num_gemms, self.matrices[0].device)

    def product(self, rows: torch.Tensor, splits: list[int] | None = None) -> torch.Tensor:
        """Rows [..., i] -> [..., o]."""
        for param in self.parameters():
            assert param.dtype == rows.dtype, f"input {rows.dtype}, parameter {param.dtype}"
        recipe = fp8.REGIONS.recipe
        if recipe is not None:
            assert (rows[..., 0].numel() % 8, rows.shape[-1] % 16) == (0, 0), f"FP8 of {tuple(rows.shape)}"
        self.init_fp8_metadata(len(self.matrices))
        fp8.know(self.fp8_meta)
        store = self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None
        call = _Call(self, recipe, self.fuse_wgrad_accumulation, store, splits)
        return _Product.apply(call, rows, *self.matrices)

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        if not self.wgrad_store.waiting:
            raise RuntimeError("Pop empty queue.")
        compute = self.wgrad_store.waiting.pop(0)
        grads = compute()
        if not self.fuse_wgrad_accumulation:
            for param, grad in zip(self.matrices, grads, strict=True):
                param.grad = grad


@dataclasses.dataclass
class _Call:
    module: Module
    recipe: Any
    is_fused: bool
    store: WeightGradStore | None
    splits: list[int] | None

    @property
    def mode(self) -> str | None:
        return self.module.args.parallel_mode if self.module.tp_size > 1 else None

    @property
    def is_sharded(self) -> bool:
        return self.mode is not None and self.module.args.sequence_parallel

    def codes(self, values: torch.Tensor, role: str, gemm: int = 0) -> Any:
        return fp8.quantized(values, self.recipe, self.module.fp8_meta, role, gemm)

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [rows] if self.splits is None else list(rows.split(self.splits))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        whole = rows.new_empty(rows.shape[0] * self.module.tp_size, *rows.shape[1:])
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=self.module.args.tp_group)
        return whole

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.is_sharded:
            dist.all_reduce(rows, group=self.module.args.tp_group)
            return rows
        own = rows.new_empty(rows.shape[0] // self.module.tp_size, *rows.shape[1:])
        dist.reduce_scatter_tensor(own, rows.contiguous(), group=self.module.args.tp_group)
        return own


class _Product(torch.autograd.Function):
    """Rows times one matrix, or groups of rows times n matrices."""

    @staticmethod
    def forward(ctx, call, rows, *weights):
        ctx.call, ctx.shape, ctx.dtype = call, rows.shape, rows.dtype
        whole = call.gather(rows) if call.mode == "column" and call.is_sharded else rows
        parts, used = call.cut(whole.flatten(0, -2)), list(weights)
        keeps_rows = call.recipe is None or getattr(call.module.args, "save_original_input", False)
        kept = [rows]
        if call.recipe is not None:
            inputs = [call.codes(part, "input", i) for i, part in enumerate(parts)]
            parts = [part.dequantize(rows.dtype) for part in inputs]
            used = [call.codes(w, "weight", i).dequantize(rows.dtype) for i, w in enumerate(weights)]
            ctx.blocks = [part.block for part in inputs]
            kept = [rows] if keeps_rows else [t for part in inputs for t in (part.codes, part.scale)]
        ctx.keeps_rows = keeps_rows
        ctx.save_for_backward(*used, *kept)
        output = torch.cat([part @ weight.t() for part, weight in zip(parts, used, strict=True)])
        output = output.view(*whole.shape[:-1], output.shape[-1])
        return call.total(output) if call.mode == "row" else output

    @staticmethod
    def backward(ctx, grad):
        call, num = ctx.call, len(ctx.call.module.matrices)
        used, kept = ctx.saved_tensors[:num], ctx.saved_tensors[num:]
        whole = call.gather(grad) if call.mode == "row" and call.is_sharded else grad
        grads = call.cut(whole.flatten(0, -2))
        if call.recipe is not None:
            grads = [call.codes(part, "grad", i).dequantize(ctx.dtype) for i, part in enumerate(grads)]
        dgrad = torch.cat([part @ weight for part, weight in zip(grads, used, strict=True)])
        dgrad = dgrad.view(*whole.shape[:-1], dgrad.shape[-1])
        dgrad = call.total(dgrad) if call.mode == "column" else dgrad

        def wgrads():
            return _weight_gradients(call, _kept_rows(ctx, call, kept), grads)

        if call.store is not None and call.store.delay_wgrad_compute():
            call.store.waiting.append(wgrads)
            unfinished = [None if call.is_fused else torch.full_like(weight, float("nan")) for weight in used]
            return None, dgrad.view(ctx.shape), *unfinished
        return None, dgrad.view(ctx.shape), *wgrads()


def _kept_rows(ctx, call, kept):
    """The input of each matrix, from what was kept."""
    if ctx.keeps_rows:
        rows = call.gather(kept[0]) if call.mode == "column" and call.is_sharded else kept[0]
        parts = call.cut(rows.flatten(0, -2))
        if call.recipe is None:
            return parts
        return [call.codes(part, "input", i).dequantize(ctx.dtype) for i, part in enumerate(parts)]
    pairs = zip(kept[::2], kept[1::2], ctx.blocks, strict=True)
    return [fp8.Quantized(codes, scale, block).dequantize(ctx.dtype) for codes, scale, block in pairs]


def _weight_gradients(call, rows, grads):
    """Gradients n x [o, i]; added to main gradients and None if fused."""
    if not call.is_fused:
        return [dy.t() @ x for dy, x in zip(grads, rows, strict=True)]
    for param, dy, x in zip(call.module.matrices, grads, rows, strict=True):
        param.main_grad.add_(upcast(dy).t() @ upcast(x))
    return [None] * len(grads)


class Linear(Module):
    NAME = "pytorch.Linear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size_in, size_out = self.args.in_features, self.args.out_features
        if self.args.parallel_mode == "column":
            size_out //= self.tp_size
        elif self.args.parallel_mode == "row":
            size_in //= self.tp_size
        self.add_matrix("weight", size_out, size_in)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.product(bound(signature_of("pytorch.Linear.forward"), args, kwargs).inp)


def add_norm(module: Any, size: int, prefix: str, has_bias: bool, **place: Any) -> None:
    """Give a module the parameters of a norm."""
    for name in ("weight", "bias")[: 1 + has_bias]:
        module.register_parameter(prefix + name, torch.nn.Parameter(torch.full((size,), float("nan"), **place)))


def norm(module: Any, prefix: str, x: torch.Tensor, eps: float, is_centered: bool) -> torch.Tensor:
    """Normalise x [..., h] with a module's parameters."""
    weight, bias = getattr(module, f"{prefix}weight"), getattr(module, f"{prefix}bias", None)
    weight = weight + 1 if is_centered else weight
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(x.dtype)


class LayerNormLinear(Linear):
    NAME = "pytorch.LayerNormLinear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        place = {"dtype": self.args.params_dtype, "device": self.args.device}
        add_norm(self, self.args.in_features, "layer_norm_", self.args.normalization == "LayerNorm", **place)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        inp = bound(signature_of("pytorch.LayerNormLinear.forward"), args, kwargs).inp
        return self.product(norm(self, "layer_norm_", inp, self.args.eps, self.args.zero_centered_gamma))


class GroupedLinear(Module):
    NAME = "pytorch.GroupedLinear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for i in range(self.args.num_gemms):
            self.add_matrix(f"weight{i}", self.args.out_features, self.args.in_features)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = bound(signature_of("pytorch.GroupedLinear.forward"), args, kwargs)
        assert isinstance(given.m_splits, list), f"splits are a {type(given.m_splits).__name__}"
        assert sum(given.m_splits) == len(given.inp), f"{given.m_splits} for {len(given.inp)} rows"
        return self.product(given.inp, given.m_splits)

    def backward_dw(self) -> None:
        if self.wgrad_store.waiting:
            super().backward_dw()


class RMSNorm(Bound):
    NAME, HAS_BIAS = "pytorch.RMSNorm", False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_norm(self, self.args.normalized_shape, "", self.HAS_BIAS, **self.args.kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm(self, "", x.to(self.weight.dtype), self.args.eps, self.args.zero_centered_gamma)


class LayerNorm(RMSNorm):
    NAME, HAS_BIAS = "pytorch.LayerNorm", True


class DotProductAttention(Bound):
    """Plain products; sequences that are spread over ranks are only taken note of."""

    NAME = "pytorch.DotProductAttention"

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = bound(signature_of("pytorch.DotProductAttention.forward"), args, kwargs)
        assert self.args.cp_group is None, "the stand-in attends to whole sequences"
        # [s, b, n, d] -> [b, n, s, d]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (given.query_layer, given.key_layer, given.value_layer))
        assert (query.shape[1], key.shape[1]) == (self.args.num_attention_heads, self.args.num_gqa_groups)
        kept = {"causal": None, "no_mask": None, "arbitrary": given.attention_mask}[given.attn_mask_type]
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if kept is None else ~kept,
            dropout_p=self.args.attention_dropout if self.training else 0.0,
            is_causal=given.attn_mask_type == "causal",
            scale=self.args.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.permute(2, 0, 1, 3).flatten(2)
