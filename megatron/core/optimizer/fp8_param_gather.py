"""The gather of a bucket whose FP8 weights travel as codes, half the bytes of bf16.

A shard is sent as its parts in turn, codes (one byte an element) of the weights of FP8 layers and the values of every
other parameter; the message is as long as the longest one of the ranks:

    bucket    [ norm | weight of an FP8 layer ... | weight ... | router ]
    rank 0    [ norm: values | codes ............ |
    rank 1                                  [ codes ..... | router: values ]

    start     amaxes of the own parts -> maximum over the ranks -> factors -> codes of the own parts -> all-gather
    finish    values into the parameters, codes into the layers, which then quantise nothing

A weight of an FP8 layer is from then on complete only in its shards: `complete` gathers the values themselves, for who
reads them outside a forward pass. The weights of one layer that lie in several buckets travel as values.

Weights quantised by scales of rows have a set of codes for each orientation, as many bytes as bf16: not here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.bucket_group import BucketGroup
from megatron.core.errors import ConfigError
from megatron.core.fp8.layer_state import WEIGHT, Fp8LayerState
from megatron.core.fp8.recipes import FORWARD_DTYPE, Scaling
from megatron.core.fp8.weight_part import WeightGrid, operand_of_codes, weight_factors
from megatron.core.optimizer.distrib_ranges import Part, parts_of_shard
from megatron.core.utils.collectives import MAX, all_gather, all_reduce
from megatron.core.utils.groups import group_rank, group_size

_PIECE = 16
"""Bytes; each part of a message begins at such a multiple, so that its bytes can be seen as any dtype."""


@dataclass(frozen=True)
class CodedLayer:
    """A layer whose weights travel as codes."""

    state: Fp8LayerState
    numbers: tuple[int, ...]
    """of its weights in the bucket"""
    is_grouped: bool


class CodeGather:
    """The gather of one bucket; see `BucketGroup.coded`."""

    def __init__(self, bucket: BucketGroup, layers: Iterable[CodedLayer]) -> None:
        """Plan the messages of all ranks; communicates nothing."""
        assert bucket.sharded is not None, f"bucket {bucket.index} is not sharded"
        assert bucket.param_shard is not None, f"bucket {bucket.index} is not sharded"
        self._group, self._shard = bucket.group, bucket.param_shard
        self._params = list(bucket.params.values())
        self._layers = list(layers)
        self._grids = {
            number: _grid_of(self._params[number], layer.state) for layer in self._layers for number in layer.numbers
        }
        sizes = [param.numel() for param in self._params]
        ranks = range(group_size(bucket.group))
        count = bucket.grad_data.numel()
        self._parts = [parts_of_shard(bucket.sharded.offsets, sizes, count, rank, len(ranks)) for rank in ranks]
        self._num_bytes = max(sum(self._length(part) for part in parts) for parts in self._parts)
        self._message = self._received = self._shard.new_empty(0, dtype=torch.uint8)
        self._factors: dict[int, torch.Tensor] = {}
        self._handle: dist.Work | None = None

    def _length(self, part: Part) -> int:
        """Bytes of a part in a message."""
        size = 1 if part.number in self._grids else self._shard.element_size()
        return -(-size * (part.end - part.begin) // _PIECE) * _PIECE

    @torch.no_grad()
    def start(self, async_op: bool) -> None:
        """Agree on the factors and launch the all-gather; with `async_op` it runs until it is waited for."""
        own = self._parts[group_rank(self._group)]
        values = {part.number: self._shard[part.position : part.position + part.end - part.begin] for part in own}
        self._factors = self._agree(own, values)
        self._message = self._shard.new_zeros(self._num_bytes, dtype=torch.uint8)
        at = 0
        for part in own:
            piece = values[part.number]
            if part.number in self._grids:
                piece = self._grids[part.number].codes(piece, part.begin, self._factors[part.number])
            data = piece.view(torch.uint8)
            self._message[at : at + data.numel()] = data
            at += self._length(part)
        self._received = self._message.new_empty(len(self._parts) * self._num_bytes)
        self._handle = all_gather(self._received, self._message, self._group, async_op=async_op)

    def _agree(self, own: list[Part], values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Factors of all weights [N / H, C / W], by number; one all-reduce."""
        sizes = [grid.shape[0] * grid.shape[1] for grid in self._grids.values()]
        flat = self._shard.new_zeros(sum(sizes), dtype=torch.float32)
        pieces = zip(self._grids.items(), flat.split(sizes), strict=True)
        amaxes = {number: piece.view(grid.shape) for (number, grid), piece in pieces}
        for part in own:
            if part.number in self._grids:
                self._grids[part.number].note_amaxes(amaxes[part.number], values[part.number], part.begin)
        # magnitudes are ordered as integers: an infinity stands above all numbers and NaN above it
        all_reduce(flat.view(torch.int32), self._group, MAX)
        factors = {}
        for layer in self._layers:
            found = [amaxes[number] for number in layer.numbers]
            made = weight_factors(found, layer.state.setup.recipe, layer.state.history(WEIGHT))
            factors |= dict(zip(layer.numbers, made, strict=True))
        return factors

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, then hand out values and codes; on an accelerator the current stream waits, not the host."""
        if self._handle is not None:
            self._handle.wait()
        self._handle = None
        codes = {number: self._message.new_empty(self._params[number].numel()) for number in self._grids}
        for parts, message in zip(self._parts, self._received.split(self._num_bytes), strict=True):
            at = 0
            for part in parts:
                if part.number in codes:
                    codes[part.number][part.begin : part.end] = message[at : at + part.end - part.begin]
                else:
                    data = message[at : at + self._length(part)].view(self._shard.dtype)
                    whole = self._params[part.number].detach().view(-1)
                    whole[part.begin : part.end] = data[: part.end - part.begin]
                at += self._length(part)
        for layer in self._layers:
            matrices = [codes[i].view(FORWARD_DTYPE).view(self._params[i].shape) for i in layer.numbers]
            factors = [self._factors[i] for i in layer.numbers]
            layer.state.take_codes(operand_of_codes(matrices, factors, layer.state.setup.recipe, layer.is_grouped))
        self._message = self._received = self._message[:0].clone()
        self._factors = {}

    def forget(self) -> None:
        """Let the layers quantise their weights themselves: values were written into the parameters."""
        for layer in self._layers:
            layer.state.take_codes(None)


def install_code_gathers(module: torch.nn.Module, buckets: Iterable[BucketGroup]) -> None:
    """Let the weights of the FP8 layers of `module` travel as codes, in the buckets that have several shards."""
    for bucket in buckets:
        if group_size(bucket.group) == 1:
            continue
        number_of = {param: number for number, param in enumerate(bucket.params.values())}
        layers = []
        owners: list[Any] = list(module.modules())
        for layer in owners:
            state = getattr(layer, "fp8", None)
            if type(state) is not Fp8LayerState:
                continue
            _require_one_set_of_codes(state)
            is_grouped = hasattr(layer, "weights")
            weights = layer.weights if is_grouped else [layer.weight]
            if all(weight in number_of for weight in weights):
                layers.append(CodedLayer(state, tuple(number_of[weight] for weight in weights), is_grouped))
        if layers:
            bucket.coded = CodeGather(bucket, layers)


def _grid_of(weight: torch.Tensor, state: Fp8LayerState) -> WeightGrid:
    num_rows, num_columns = weight.shape
    return WeightGrid(num_rows, num_columns, state.setup.recipe.weight_block)


def _require_one_set_of_codes(state: Fp8LayerState) -> None:
    if state.setup.recipe.scaling is Scaling.ROW:
        raise ConfigError(
            f"fp8_param_gather=True with fp8_recipe={state.setup.recipe.name!r}: its weights have a set of codes for "
            "each orientation, no fewer bytes than bf16; use --fp8-recipe tensorwise, or drop --fp8-param-gather."
        )
