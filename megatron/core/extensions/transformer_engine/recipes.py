"""FP8 of Transformer Engine: which of its recipes stands for which of ours, and the state of delayed scaling.

    ours        theirs                what shares a scale
    delayed     DelayedScaling        tensor, from amaxes of earlier steps
    tensorwise  Float8CurrentScaling  tensor, from its amax
    blockwise   Float8BlockScaling    1 x 128 of activations and gradients, 128 x 128 of weights
    rowwise     none: refused

Delayed scaling. The library would advance its histories whenever an outermost region ends, once per microbatch. Here
the history is a buffer of the layer, as in the local implementation, with the same name and meaning: it advances once
per step, after a maximum over the ranks, and a step that is undone leaves it as it was. The engine's own row of amaxes
only collects the step, its scales are written when a schedule begins, and the library's global updates do not know it.
A first step without history runs with a scale of 1.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.extensions.transformer_engine.probe import Library
from megatron.core.fp8.layer_state import GRADIENT, INPUT, WEIGHT, Fp8LayerState, Fp8Setup, fp8_setup
from megatron.core.fp8.quantize import factor_of
from megatron.core.fp8.recipes import FORWARD_DTYPE, Scaling

_KEPT_OUT = "buffer_index_and_autocast_key"  # a layer with this entry counts as known to the global updates
_FORWARD_TENSORS, _BACKWARD_TENSORS = 3, 2  # amaxes of one product: input, weight, output; dy, dx


class EngineFp8State(Fp8LayerState):
    """FP8 of one engine with `num_gemms` matrices."""

    _engine: Any

    def __init__(self, setup: Fp8Setup, autocast: Callable[[], AbstractContextManager[None]], num_gemms: int) -> None:
        super().__init__(setup)
        self._autocast, self._num_gemms = autocast, num_gemms
        self._is_stale = True

    def forget_weight(self) -> None:
        """A schedule begins: the scales of the history apply."""
        self._is_stale = True

    @contextmanager
    def region(self, engine: Any) -> Iterator[None]:
        """Where the engine computes in FP8."""
        with self._autocast():
            if self.amax_history is not None and self._is_stale:
                self._begin_step(engine)
            self._is_stale = False
            yield

    def _begin_step(self, engine: Any) -> None:
        """Write the scales of the history, and let amaxes begin at zero. Host: no synchronisation."""
        object.__setattr__(self, "_engine", engine)  # no child of this module
        engine.fp8_meta[_KEPT_OUT] = []
        engine.init_fp8_metadata(num_gemms=self._num_gemms)
        assert self.amax_history is not None, "a step of delayed scaling without a history"
        past = self.amax_history.amax(0) if self.setup.takes_largest else self.amax_history[0]
        for operand, (scale, amax) in self._slots(engine).items():
            dtype = self.setup.gradient_dtype if operand == GRADIENT else FORWARD_DTYPE
            scale.copy_(factor_of(past[operand], dtype, self.setup.margin).expand_as(scale))
            amax.zero_()

    def _slots(self, engine: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The engine's scale and amax, fp32 [num_gemms] each, of input, weight and output gradient."""
        forward, backward = (engine.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd"))

        def every(state: Any, first: int, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
            return state.scale[first::stride], state.amax_history[0][first::stride]

        return {
            INPUT: every(forward, 0, _FORWARD_TENSORS),
            WEIGHT: every(forward, 1, _FORWARD_TENSORS),
            GRADIENT: every(backward, 0, _BACKWARD_TENSORS),
        }

    def step_amaxes(self) -> torch.Tensor | None:
        """Largest amaxes of this step over the engine's matrices, fp32 [3]; None without a history."""
        if self.step_amax is not None and "_engine" in self.__dict__:
            for operand, (_, amax) in self._slots(self._engine).items():
                self.step_amax[operand].copy_(amax.amax())
        return self.step_amax


def build_engine_fp8(config: TransformerConfig, library: Library, num_gemms: int) -> EngineFp8State | None:
    """State of an engine's FP8 under `config`; None without FP8.

    Raises: ConfigError if the library, or its present release, has no such recipe.
    """
    setup = fp8_setup(config)
    if setup is None:
        return None
    pytorch, recipe = library.root.pytorch, _build_recipe(config, setup, library)
    if library.has("autocast"):
        autocast = functools.partial(pytorch.autocast, enabled=True, recipe=recipe)
    else:
        autocast = functools.partial(pytorch.fp8_autocast, enabled=True, fp8_recipe=recipe)
    return EngineFp8State(setup, autocast, num_gemms)


def _build_recipe(config: TransformerConfig, setup: Fp8Setup, library: Library) -> Any:
    recipes = library.root.common.recipe
    given = f"fp8_recipe={config.fp8_recipe!r}"
    if not setup.quantizes_wgrad:
        raise ConfigError(
            "fp8_wgrad=False with transformer_impl='transformer_engine': its weight gradients take the precision of "
            "the recipe; drop --no-fp8-wgrad, or use --transformer-impl local."
        )
    form = recipes.Format.HYBRID if config.fp8 == "hybrid" else recipes.Format.E4M3
    if setup.recipe.uses_history:
        library.need("delayed_scaling", given)
        return recipes.DelayedScaling(
            margin=setup.margin, fp8_format=form, amax_history_len=1, amax_compute_algo="most_recent"
        )
    if setup.recipe.scaling is Scaling.TENSOR:
        library.need("current_scaling", given)
        return recipes.Float8CurrentScaling(fp8_format=form)
    if setup.recipe.scaling is Scaling.BLOCK:
        library.need("block_scaling", given)
        return recipes.Float8BlockScaling(fp8_format=form)
    raise ConfigError(
        f"{given} with transformer_impl='transformer_engine': it has no such recipe; use --fp8-recipe delayed, "
        "tensorwise or blockwise, or --transformer-impl local."
    )
