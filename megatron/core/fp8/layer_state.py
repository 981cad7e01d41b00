"""What one linear layer keeps for FP8: its setup, the codes of its weights, and the amaxes that delayed scaling needs.

Weights are quantised once in a schedule and used by all microbatches.

Delayed scaling takes a factor from amaxes of earlier steps, so that a tensor need not be read twice:

    step n          factor = from the history; |x| beyond it saturates.   step_amax = max(step_amax, amax of x)
    end of step n   step_amax: maximum over all ranks of the pipeline stage; it becomes the newest entry of the history

An operand whose history holds only zeros (the first step, or an expert that had no rows) takes its present amax.
An amax that is not finite leaves the newest entry as it was. All of it is buffers on the device: the history is saved
with the model, and a step that is undone restores both.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from megatron.core.configs.fp8 import Fp8Config
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.fp8.operand import quantize_weight
from megatron.core.fp8.quantize import AmaxHistory, Operand
from megatron.core.fp8.recipes import FORWARD_DTYPE, Fp8RecipeSpec, gradient_dtype, recipe_spec
from megatron.core.utils.stacked import stacked

INPUT, WEIGHT, GRADIENT = range(3)
"""Columns of the history."""


@dataclasses.dataclass(frozen=True)
class Fp8Setup:
    """How one layer uses FP8."""

    recipe: Fp8RecipeSpec
    gradient_dtype: torch.dtype
    quantizes_wgrad: bool = True
    """The weight gradient is a product of codes; else of the original tensors."""
    margin: int = 0
    history_len: int = 1
    takes_largest: bool = False
    """Delayed scaling uses the largest amax of the history; else the newest."""


class Fp8LayerState(torch.nn.Module):
    """State of one linear layer, or of the grouped layer of n experts."""

    def __init__(self, setup: Fp8Setup) -> None:
        super().__init__()
        self.setup = setup
        self._weight: Operand | None = None
        self._given: Operand | None = None
        self.amax_history: torch.Tensor | None
        self.step_amax: torch.Tensor | None
        history = torch.zeros(setup.history_len, 3) if setup.recipe.uses_history else None
        self.register_buffer("amax_history", history)  # fp32 [history_len, 3], newest first
        self.register_buffer("step_amax", None if history is None else torch.zeros(3), persistent=False)  # fp32 [3]

    def forget_weight(self) -> None:
        """Quantise the weights again at their next use: they may have changed."""
        self._weight = None

    def take_codes(self, operand: Operand | None) -> None:
        """Use codes of the weights that came from elsewhere, until others come; None: quantise the weights again."""
        self._given = operand
        self._weight = None

    def weight(self, weights: Sequence[torch.Tensor], is_grouped: bool) -> Operand:
        """Codes of the one weight [o, i] of a dense layer, or of the n weights of a grouped one as [n, o, i]."""
        if self._given is not None:
            return self._given
        if self._weight is None:
            matrix = (stacked(weights) if is_grouped else weights[0]).detach()
            self._weight = quantize_weight(matrix, self.setup.recipe, FORWARD_DTYPE, self.history(WEIGHT))
        return self._weight

    def history(self, operand: int, is_noted: bool = True) -> AmaxHistory | None:
        """What delayed scaling knows of an operand; None for recipes without a history.

        An evaluation leaves its amaxes unnoted: they are no part of a step.
        """
        if self.amax_history is None:
            return None
        assert self.step_amax is not None, "a history without a place for the step's amax"
        seen = self.amax_history[:, operand]
        past = seen.amax() if self.setup.takes_largest else seen[0]
        return AmaxHistory(past, self.step_amax[operand] if is_noted else None, self.setup.margin)

    def step_amaxes(self) -> torch.Tensor | None:
        """Amaxes of this step fp32 [3], for the maximum over the ranks; None without a history."""
        return self.step_amax

    def apply_step_amaxes(self, amaxes: torch.Tensor) -> None:
        """Make the maximum over the ranks, fp32 [3], the newest entry of the history, and begin a new step."""
        assert self.amax_history is not None, "amaxes for a recipe without a history"
        newest = torch.where(amaxes.isfinite(), amaxes, self.amax_history[0])
        self.amax_history.copy_(torch.cat([newest.unsqueeze(0), self.amax_history[:-1]]))
        assert self.step_amax is not None, "a history without a place for the step's amax"
        self.step_amax.zero_()


def fp8_setup(config: Fp8Config) -> Fp8Setup | None:
    """How the layers under `config` use FP8; None if they do not."""
    if config.fp8 is None:
        return None
    return Fp8Setup(
        recipe_spec(config.fp8_recipe),
        gradient_dtype(config.fp8),
        config.fp8_wgrad,
        config.fp8_margin,
        config.fp8_amax_history_len,
        takes_largest=config.fp8_amax_compute_algo == "max",
    )


def expert_row_multiple(config: TransformerConfig) -> int:
    """Rows of each expert must be a multiple of this, where experts are grouped."""
    setup = fp8_setup(config)
    return 1 if setup is None or not config.moe_grouped_gemm else setup.recipe.row_multiple


def build_fp8_state(config: TransformerConfig) -> Fp8LayerState | None:
    """State of a linear layer under `config`; None without FP8.

    Raises: ConfigError on a GPU whose tensor cores have no FP8.
    """
    setup = fp8_setup(config)
    if setup is None:
        return None
    if config.device != "cpu" and torch.cuda.is_available():
        _require_capability(setup.recipe)
    return Fp8LayerState(setup)


def _require_capability(recipe: Fp8RecipeSpec) -> None:
    found = torch.cuda.get_device_capability()
    if found < recipe.min_capability:
        wanted, has = (".".join(map(str, version)) for version in (recipe.min_capability, found))
        raise ConfigError(
            f"fp8_recipe={recipe.name!r}: needs a GPU of compute capability {wanted}, this one has {has}; drop "
            "--fp8-format."
        )


def forget_weight_codes(chunks: Iterable[torch.nn.Module]) -> None:
    """Let every FP8 layer quantise its weights again: a schedule begins, weights may have changed."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Fp8LayerState):
                module.forget_weight()
