"""Brings the parameters of sharded buckets back to all ranks after each optimizer step.

Without overlap all buckets are gathered at once. With overlap a bucket is waited for when forward comes to a layer that
owns one of its parameters, and the gather of the next one is started at that moment:

    compute  | step |    wait 0 | layers of bucket 0 | wait 1 | layers of bucket 1 | ...
    comm            | gather 0  | gather 1           |        | gather 2           |

The order is that of forward, the reverse of the reductions, and the same on all ranks: only how far the sequence has
come depends on the layers called. A layer that runs twice, or a second microbatch, finds its bucket complete.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.distributed.bucket_group import BucketGroup


class ParamGather:
    """The gathers of one model chunk, in the order in which forward needs them."""

    def __init__(self, buckets: Sequence[BucketGroup], module: torch.nn.Module, overlap: bool) -> None:
        """Take the buckets in the order of forward; with `overlap` install a hook on each layer with parameters."""
        self.buckets = list(buckets)
        self.overlap = overlap
        self.num_started = self.num_finished = len(self.buckets)
        if overlap:
            self._install_hooks(module)

    def _install_hooks(self, module: torch.nn.Module) -> None:
        position_of = {param: i for i, bucket in enumerate(self.buckets) for param in bucket.params.values()}
        for layer in module.modules():
            positions = [position_of[p] for p in layer.parameters(recurse=False) if p in position_of]
            if positions:
                layer.register_forward_pre_hook(functools.partial(self._before_forward, max(positions) + 1))

    def _before_forward(self, num_needed: int, layer: torch.nn.Module, inputs: Any) -> None:
        if self.num_finished < num_needed:
            self._advance(num_needed)

    def start(self) -> None:
        """The shards are updated: gather everything, or with overlap the first bucket beside what follows."""
        self.finish()
        self.num_started = self.num_finished = 0
        if self.overlap:
            self._start_up_to(1)
        else:
            self.finish()

    def finish(self) -> None:
        """Complete the parameters of all buckets."""
        self._advance(len(self.buckets))

    def _advance(self, num_needed: int) -> None:
        """Complete the first `num_needed` buckets, with the one behind them on its way if gathers overlap."""
        self._start_up_to(num_needed + 1)
        while self.num_finished < num_needed:
            self.buckets[self.num_finished].finish_param_gather()
            self.num_finished += 1

    def _start_up_to(self, count: int) -> None:
        while self.num_started < min(count, len(self.buckets)):
            self.buckets[self.num_started].start_param_gather(async_op=self.overlap)
            self.num_started += 1
