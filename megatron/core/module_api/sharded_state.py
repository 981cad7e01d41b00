"""Where each parameter and persistent buffer of this rank lies in a checkpoint.

Keys are those of Megatron's torch_dist format:

    decoder.layers.3.x.weight                       layers of one kind: decoder.layers.x.weight, box 3 of [L, ...]
                                                    mixed: as it is
    ...input_layernorm.weight                       ...self_attention.linear_qkv.layer_norm_weight
    ...pre_mlp_layernorm.weight of a dense layer    ...mlp.linear_fc1.layer_norm_weight
    ...mlp.experts.linear_fc1.weight5               ...mlp.experts.experts.linear_fc1.weight, box 5 of [E, ...]
"""

import re
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from megatron.core.configs.layer_pattern import moe_layer_pattern
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.dist_checkpointing import ShardedTensor, boxes_of_range
from megatron.core.module_api.global_names import named_global_buffers, named_global_parameters
from megatron.core.param_attrs import ParamAttrs, num_real_rows, param_attrs

_LAYER = re.compile(r"(?P<block>.*decoder\.layers)\.(?P<number>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<experts>.*mlp\.experts)\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)(?P<number>\d+)")


@dataclass(frozen=True)
class StackedKey:
    """Key of a global tensor, with the axes in front that number layers and experts."""

    key: str
    """name in the files"""
    lead_shape: tuple[int, ...] = ()
    """sizes of the leading axes"""
    lead_offset: tuple[int, ...] = ()
    """this tensor's number on each of them"""

    def boxes(self, tensor: Tensor, param: torch.nn.Parameter | None = None) -> list[ShardedTensor]:
        """Place a tensor that is cut as `param` is: its values, a moment, a main copy; without `param` nothing is cut.

        Shapes: `tensor` as the local parameter; one box, or one for each part of a gated fc1 that TP cuts by itself.
        """
        if param is None:
            return [self._box(tensor, tuple(tensor.shape), (0,) * tensor.dim())]
        boxes = self._rectangle(tensor, (0,) * tensor.dim(), tuple(tensor.shape), param_attrs(param))
        return [replace(box, num_needed_rows=num_real_rows(param)) for box in boxes]

    def flat_boxes(self, flat: Tensor, flat_range: tuple[int, int], param: torch.nn.Parameter) -> list[ShardedTensor]:
        """Place elements `flat_range` of the flattened `param` [...], which is cut or not.

        Shapes: `flat` [n]. The range falls into rectangles, and each of them where the parts of a gated fc1 meet.
        """
        boxes: list[ShardedTensor] = []
        position = 0
        for offset, size in boxes_of_range(tuple(param.shape), *flat_range):
            data = flat[position : position + prod(size)].view(size)
            position += prod(size)
            boxes += self._rectangle(data, offset, tuple(param.shape), param_attrs(param))
        return [replace(box, num_needed_rows=num_real_rows(param)) for box in boxes]

    def _rectangle(
        self, data: Tensor, offset: tuple[int, ...], shape: tuple[int, ...], attrs: ParamAttrs
    ) -> list[ShardedTensor]:
        """One box for each part that `data` [...] touches; it lies at `offset` of a local tensor of `shape`."""
        dim, full = attrs.partition_dim, attrs.full_shape
        if dim is None or full is None or full == shape:
            return [self._box(data, shape, offset)]
        part_size, full_part = shape[dim] // attrs.num_parts, full[dim] // attrs.num_parts
        boxes, begin, end = [], offset[dim], offset[dim] + data.shape[dim]
        while begin < end:
            part, within = divmod(begin, part_size)
            count = min(end - begin, part_size - within)
            start = part * full_part + attrs.partition_rank * part_size + within
            piece = data.narrow(dim, begin - offset[dim], count)
            boxes.append(self._box(piece, full, (*offset[:dim], start, *offset[dim + 1 :])))
            begin += count
        return boxes

    def _box(self, tensor: Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> ShardedTensor:
        return ShardedTensor(self.key, tensor, self.lead_shape + shape, self.lead_offset + offset)


def sharded_model_state(module: torch.nn.Module, config: TransformerConfig) -> list[ShardedTensor]:
    """Boxes of all parameters and persistent buffers of a model chunk."""
    boxes: list[ShardedTensor] = []
    for name, param in named_global_parameters(module):
        boxes += stacked_key(name, config).boxes(param.detach(), param)
    for name, buffer in named_global_buffers(module):
        boxes += stacked_key(name, config).boxes(buffer)
    return boxes


def stacked_key(name: str, config: TransformerConfig, prefix: str = "") -> StackedKey:
    """Place the parameter or buffer with global name `name`; `prefix` stands before its key."""
    lead: list[tuple[int, int]] = []
    if layer := _LAYER.fullmatch(name):
        number, rest = int(layer["number"]), layer["rest"]
        pattern = moe_layer_pattern(config.moe_layer_freq, config.num_layers, config.num_moe_experts)
        rest = _upstream_norm_name(rest, is_moe=pattern[number])
        if len(set(pattern)) == 1:
            lead.append((len(pattern), number))
            name = f"{layer['block']}.{rest}"
        else:
            name = f"{layer['block']}.{number}.{rest}"
    if expert := _EXPERT.fullmatch(name):
        assert config.num_moe_experts is not None, f"{name} in a model without experts"
        lead.append((config.num_moe_experts, int(expert["number"])))
        name = f"{expert['experts']}.experts.{expert['linear']}.{expert['kind']}"
    return StackedKey(prefix + name, tuple(size for size, _ in lead), tuple(number for _, number in lead))


def _upstream_norm_name(rest: str, is_moe: bool) -> str:
    """Megatron stores a norm with the projection that follows it."""
    for norm, linear, applies in (
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_", True),
        ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", not is_moe),
    ):
        if applies and rest.startswith(norm):
            return linear + rest.removeprefix(norm)
    return rest
