"""What all layers on Transformer Engine share: parameters are ours, the products are a module of the library.

    parameters: names, attributes, initial weights, gradients, checkpoint keys      this layer
    products: quantising, GEMMs, their communication, what is kept for backward     `engine`, a module of the library

The engine is no child of the layer: nothing of it appears in state dicts, where its `_extra_state` would be a pickle.
Both hold the same parameter objects.

Delayed weight gradients. An engine has a queue of its own, first in, first out, over all microbatches. In front of each
backward that was recorded under a `WgradQueue` the layer puts the engine's `backward_dw` into that queue, so that the
schedule runs it where and when it runs all weight gradients. It needs main gradients: the engine would hand unfinished
gradients to autograd without. Where there are none, weight gradients are part of backward.
"""

import functools
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from megatron.core import streams
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.deferred_wgrad import WgradQueue, active_queue
from megatron.core.errors import ConfigError
from megatron.core.extensions.transformer_engine.probe import Library, load_library
from megatron.core.extensions.transformer_engine.recipes import EngineFp8State, build_engine_fp8
from megatron.core.module_api.module import MegatronModule
from megatron.core.param_attrs import ParamAttrs, set_param_attrs
from megatron.core.utils.device import resolve_device

NUM_FP8_ROWS = 16
"""FP8 products take rows in multiples of this."""

NUM_FP8_COLUMNS = 16
"""And widths in multiples of this."""


class EngineLayer(MegatronModule):
    """A layer whose products are an engine of Transformer Engine; see the file's text.

    Args:
        num_gemms: Matrices of the engine; a layer without any has no FP8.
    """

    _engine: Any

    def __init__(self, config: TransformerConfig, num_gemms: int = 1) -> None:
        super().__init__(config)
        self.is_deferrable = config.delay_wgrad_compute
        if self.is_deferrable:
            self.library.need("delayed_wgrad", "delay_wgrad_compute=True")
        self.exchanges = False
        """The engine communicates over tensor-parallel ranks."""
        self.fp8: EngineFp8State | None = build_engine_fp8(config, self.library, num_gemms) if num_gemms else None

    @property
    def library(self) -> Library:
        """The library, as it is installed."""
        return load_library()

    @property
    def engine(self) -> Any:
        """The module of the library."""
        return self._engine

    @property
    def matrices(self) -> list[torch.nn.Parameter]:
        """Parameters [o, i] whose gradients are products."""
        return [param for param in self.parameters(recurse=False) if param.dim() == 2]

    def common_arguments(self) -> dict[str, Any]:
        """Arguments that every engine with matrices takes."""
        arguments: dict[str, Any] = {
            "bias": False,
            "init_method": _leave_empty,
            "params_dtype": self.config.params_dtype,
            "device": resolve_device(self.config.device),
            "fuse_wgrad_accumulation": self.config.gradient_accumulation_fusion,
        }
        if self.is_deferrable:
            arguments["delay_wgrad_compute"] = True
        return arguments

    def adopt(self, engine: Any, attrs: Mapping[str, ParamAttrs], allreduce: bool | None = None) -> None:
        """Take over the parameters of `engine`, uninitialised, with attributes by name; keep it as the engine.

        Raises: ConfigError for widths that its FP8 products cannot take.
        """
        for name, param in engine.named_parameters(recurse=False):
            param.skip_backward_post_hook = False  # the queue reports what it holds, see `deferred_wgrad`
            self.register_parameter(name, set_param_attrs(param, attrs[name], allreduce))
        object.__setattr__(self, "_engine", engine)  # no child of this module
        for matrix in self.matrices if self.fp8 is not None else ():
            if any(size % NUM_FP8_COLUMNS for size in matrix.shape):
                raise ConfigError(
                    f"fp8={self.config.fp8!r} with a matrix of {tuple(matrix.shape)} in {type(self).__name__}: "
                    f"Transformer Engine's products need multiples of {NUM_FP8_COLUMNS}; choose --hidden-size, "
                    "--kv-channels and the widths of MLP and experts so, or use --transformer-impl local."
                )

    def train(self, mode: bool = True) -> "EngineLayer":
        """Switch the engine as well."""
        super().train(mode)
        if "_engine" in self.__dict__:
            self.engine.train(mode)
        return self

    def run_engine(self, rows: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Multiply rows [..., i] -> [..., o], in FP8 if the layer has it."""
        engine, queue = self.engine, None
        if torch.is_grad_enabled():
            engine.fuse_wgrad_accumulation = self._has_main_grads()
            queue = active_queue() if engine.fuse_wgrad_accumulation else None
            self._set_deferring(queue is not None)
        streams.declare(type(self).__name__, (rows, *self.matrices))
        with nullcontext() if self.fp8 is None else self.fp8.region(engine):
            output = engine(rows, *arguments)
        streams.declare(type(self).__name__, (), (output,))
        if self.is_deferrable and output.grad_fn is not None:
            output.grad_fn.register_prehook(functools.partial(self._begin_backward, queue))
        return output

    def run_padded(self, rows: torch.Tensor) -> torch.Tensor:
        """`run_engine` for any number of rows [..., i] -> [..., o]: zeros are added if the products need more.

        Raises: ConfigError if zeros would end up between the rows of other ranks.
        """
        num_rows = math.prod(rows.shape[:-1])
        missing = -num_rows % NUM_FP8_ROWS if self.fp8 is not None else 0
        if num_rows == 0:
            missing = NUM_FP8_ROWS
        if not missing:
            return self.run_engine(rows)
        if self.exchanges:
            raise ConfigError(
                f"fp8={self.config.fp8!r} with an input of {num_rows} rows on each tensor-parallel rank: Transformer "
                f"Engine's products need a multiple of {NUM_FP8_ROWS}; change --seq-length or --micro-batch-size, "
                "or use --transformer-impl local."
            )
        # [..., i] -> [num_rows + missing, i]
        padded = torch.nn.functional.pad(rows.reshape(num_rows, rows.shape[-1]), (0, 0, 0, missing))
        output = self.run_engine(padded)[:num_rows]
        return output.view(*rows.shape[:-1], output.shape[-1])

    def _begin_backward(self, queue: WgradQueue | None, grads: tuple[torch.Tensor, ...]) -> None:
        """In front of a backward: defer its weight gradient exactly if its forward was recorded under a queue."""
        self._set_deferring(queue is not None)
        if queue is not None:
            queue.put(self.matrices, self._run_deferred)
        streams.declare(f"{type(self).__name__} backward", (*grads, *self.matrices))

    def _run_deferred(self) -> None:
        """Compute the oldest weight gradient that the engine holds."""
        main_grads = [getattr(param, "main_grad", None) for param in self.matrices]
        streams.declare(f"{type(self).__name__} wgrad", main_grads, main_grads)
        self._set_deferring(True)
        with torch.no_grad():
            self.engine.backward_dw()

    def _set_deferring(self, is_on: bool) -> None:
        if self.is_deferrable:
            store = self.engine.wgrad_store
            (store.enable_delay_wgrad_compute if is_on else store.disable_delay_wgrad_compute)()

    def _has_main_grads(self) -> bool:
        return self.config.gradient_accumulation_fusion and all(
            param.requires_grad and getattr(param, "main_grad", None) is not None for param in self.matrices
        )


def _leave_empty(tensor: torch.Tensor) -> None:
    """Take the place of an initialiser of tensor [...]: weights are drawn by name when the model is complete."""
