"""The FP8 recipes: what shares a scale, and what follows from that for alignment, state and hardware.

A linear layer is three products. Each operand's scales must be constant along the dimension that its product sums over,
up to blocks of 128, so an operand that enters two products may need two copies:

    forward   Y  = X W^T      sums over the inputs     X by row,    W by row
    dgrad     dX = dY W       sums over the outputs    dY by row,   W by column
    wgrad     dW = dY^T X     sums over the tokens     dY by column, X by column

    recipe      X, dY                W                     copies of each operand
    delayed     tensor, from history tensor, from history  one set of codes for both orientations
    tensorwise  tensor, present amax tensor, present amax  the same
    rowwise     row / column         row / column          two, each scaled along its own sum
    blockwise   1 x 128              128 x 128             X and dY two, W one (a square block serves both)

Blockwise scaling covers dense layers only, shared experts among them: grouped products that apply a scale to each 128
products take about as long as bf16's, or longer.

Forward operands are e4m3. Gradients are e5m2 under `hybrid`, which has the wider range, else e4m3.

To add one: a row in `RECIPES`.
"""

import dataclasses
import enum

import torch

from megatron.core.errors import ConfigError


class Scaling(enum.Enum):
    """What shares one scale."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"


@dataclasses.dataclass(frozen=True)
class Fp8RecipeSpec:
    """What the rest of the tree may ask of a recipe, in place of its name."""

    name: str
    """Value of --fp8-recipe."""

    scaling: Scaling
    """What shares a scale."""

    row_multiple: int
    """Rows of an expert, and tokens of a dense layer, are padded to a multiple of this."""

    activation_block: tuple[int, int] | None = None
    """Block of inputs and gradients that shares a scale, the sum along the second dimension."""

    weight_block: tuple[int, int] | None = None
    """Block of a weight that shares a scale; square, so that one set of codes serves both orientations."""

    uses_history: bool = False
    """Scales come from amaxes of earlier steps, which are state: saved, reduced over ranks, advanced once a step."""

    covers_experts: bool = True
    """Experts are in FP8 as well. Not where their products would take longer than bf16's."""

    min_capability: tuple[int, int] = (9, 0)
    """Compute capability of the first GPU that has it."""


RECIPES = {
    spec.name: spec
    for spec in (
        Fp8RecipeSpec("delayed", Scaling.TENSOR, row_multiple=16, uses_history=True),
        Fp8RecipeSpec("tensorwise", Scaling.TENSOR, row_multiple=16),
        Fp8RecipeSpec("rowwise", Scaling.ROW, row_multiple=16),
        Fp8RecipeSpec(
            "blockwise",
            Scaling.BLOCK,
            row_multiple=128,
            activation_block=(1, 128),
            weight_block=(128, 128),
            covers_experts=False,
        ),
    )
}


WIRE = RECIPES["blockwise"]
"""How rows are quantised that travel in FP8, whatever the recipe of the layers."""


def recipe_spec(name: str) -> Fp8RecipeSpec:
    """Return the recipe behind a value of --fp8-recipe."""
    if name not in RECIPES:
        raise ConfigError(f"fp8_recipe={name!r}: not a recipe of this tree; choose one of {', '.join(RECIPES)}.")
    return RECIPES[name]


FORWARD_DTYPE = torch.float8_e4m3fn


def gradient_dtype(fp8_format: str) -> torch.dtype:
    """Dtype of gradients under a value of --fp8-format."""
    return torch.float8_e5m2 if fp8_format == "hybrid" else FORWARD_DTYPE
