"""FP8 of the stand-in for Transformer Engine: regions, recipes, scales and amaxes of a module, codes of a tensor.

As in the library: delayed scaling reads the scale of a tensor and notes its amax, and histories of known modules
advance when an outermost region ends. Codes are those of `core/fp8/quantize`.
"""

import dataclasses
import types
from typing import Any

import torch

from megatron.core.fp8.quantize import Quantized, quantize_blocks, quantize_tensor, to_codes

KEPT_OUT = "buffer_index_and_autocast_key"
FORMATS = types.SimpleNamespace(HYBRID="HYBRID", E4M3="E4M3")


@dataclasses.dataclass
class Regions:
    """Where the process stands."""

    recipe: Any = None
    depth: int = 0
    known: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_advanced: int = 0
    """Histories that the library advanced by itself."""


REGIONS = Regions()


class Region:
    """What `autocast` returns."""

    def __init__(self, enabled: bool, recipe: Any) -> None:
        self.recipe = recipe if enabled else None

    def __enter__(self) -> None:
        self.before, REGIONS.recipe = REGIONS.recipe, self.recipe
        REGIONS.depth += 1

    def __exit__(self, *_: object) -> None:
        REGIONS.recipe, REGIONS.depth = self.before, REGIONS.depth - 1
        if self.recipe is not None and REGIONS.depth == 0 and torch.is_grad_enabled():
            for meta in REGIONS.known:
                REGIONS.num_advanced += 1
                meta["scaling_fwd"].amax_history.zero_()


def init_meta(meta: dict[str, Any], num_gemms: int, device: torch.device) -> None:
    """Allocate scales and amaxes of a module under the present recipe, once."""
    recipe = REGIONS.recipe
    if recipe is None or recipe.kind != "delayed" or "scaling_fwd" in meta:
        return
    for key, size in (("scaling_fwd", 3 * num_gemms), ("scaling_bwd", 2 * num_gemms)):
        history = torch.zeros(recipe.amax_history_len, size, device=device)
        meta[key] = types.SimpleNamespace(scale=torch.ones(size, device=device), amax_history=history)


def know(meta: dict[str, Any]) -> None:
    """Let the histories of a module advance with the others', unless it counts as known."""
    if REGIONS.recipe is not None and REGIONS.recipe.kind == "delayed" and KEPT_OUT not in meta:
        meta[KEPT_OUT] = [len(REGIONS.known)]
        REGIONS.known.append(meta)


def quantized(values: torch.Tensor, recipe: Any, meta: dict[str, Any], role: str, gemm: int) -> Quantized:
    """Codes of values [R, C]: input, weight or grad of one product."""
    is_grad = role == "grad"
    dtype = torch.float8_e5m2 if is_grad and recipe.fp8_format == "HYBRID" else torch.float8_e4m3fn
    if recipe.kind == "current":
        return quantize_tensor(values, dtype)
    if recipe.kind == "block":
        return quantize_blocks(values, dtype, (128, 128) if role == "weight" else (1, 128))
    state = meta["scaling_bwd" if is_grad else "scaling_fwd"]
    place = 2 * gemm if is_grad else 3 * gemm + (role == "weight")
    if values.numel():
        amax = state.amax_history[0]
        amax[place] = torch.maximum(amax[place], values.abs().amax().float())
    factor = state.scale[place].clone()
    return Quantized(to_codes(values.float() * factor, dtype), factor.reciprocal())
