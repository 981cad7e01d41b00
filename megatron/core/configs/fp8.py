"""Training in FP8: which layers, which format, which recipe."""

import dataclasses
from typing import Literal

import torch

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob

_PIECE = 16
MOST_MARGIN = 15
"""A larger power of two leaves nothing of the range of e5m2."""
LONGEST_HISTORY = 65536


@dataclasses.dataclass(kw_only=True)
class Fp8Config(ConfigTopic):
    """FP8 for the linear layers of the decoder; embedding, router, norms, attention and output layer keep theirs."""

    fp8: Literal["e4m3", "hybrid"] | None = knob(None, flag="--fp8-format")
    """Compute linear layers in FP8: e4m3 everywhere, or with gradients in e5m2 (hybrid)."""

    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise"] = "delayed"
    """What shares a scale, and from which amax it comes; local experts stay in bf16 with blockwise."""

    fp8_margin: int = 0
    """Delayed scaling leaves 2^margin of the range unused."""

    fp8_amax_history_len: int = 1
    """Delayed scaling looks back this many steps."""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Delayed scaling takes the latest amax of the history, or its largest."""

    fp8_wgrad: bool = knob(True, flag="--no-fp8-wgrad --disable-fp8-wgrad")
    """Weight gradients in FP8; the flag computes them from the original tensors, which are then kept."""

    first_last_layers_bf16: bool = False
    """Leave the first and last layers out of FP8."""

    num_layers_at_start_in_bf16: int = 1
    """How many layers at the start, with --first-last-layers-bf16."""

    num_layers_at_end_in_bf16: int = 1
    """How many layers at the end, with --first-last-layers-bf16."""

    def check(self) -> list[Violation]:
        """Counts make sense, and products have a dtype to add up in."""
        if self.fp8 is None:
            return []
        found = []
        for name, least, most in (("fp8_margin", 0, MOST_MARGIN), ("fp8_amax_history_len", 1, LONGEST_HISTORY)):
            if not least <= getattr(self, name) <= most:
                remedy = f"set --{name.replace('_', '-')} to such a number"
                found.append(violation(self, name, f"from {least} to {most}", remedy))
        counts = "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
        if min(self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16) < 0:
            found.append(violation(self, counts, "not negative", "set both to 0 or more"))
        num_layers = getattr(self, "num_layers", 0)
        num_bf16 = self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16
        if num_layers and self.first_last_layers_bf16 and num_bf16 >= num_layers:
            remedy = "lower the counts, or drop --fp8-format"
            found.append(violation(self, f"num_layers {counts}", "no layer is left for FP8", remedy))
        if getattr(self, "params_dtype", None) == torch.float64:
            remedy = "compute in --bf16, or drop --fp8-format"
            found.append(violation(self, "fp8 params_dtype", "FP8 products add up in fp32", remedy))
        return [*found, *self._odd_widths()]

    def _odd_widths(self) -> list[Violation]:
        """Widths that kernels do not take; without a GPU the same codes are multiplied in fp32, whatever the width."""
        device = getattr(self, "device", "cpu")
        if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
            return []
        shards = {
            "hidden_size": 1,
            "ffn_hidden_size": getattr(self, "tensor_model_parallel_size", None) or 1,
            "moe_ffn_hidden_size": getattr(self, "expert_tensor_parallel_size", None) or 1,
        }
        odd = [name for name, parts in shards.items() if (getattr(self, name, None) or 0) % (_PIECE * parts)]
        remedy = "choose a multiple of 16 for each tensor-parallel rank, or drop --fp8-format"
        return [violation(self, f"{name} fp8", "FP8 products take 16 elements at a time", remedy) for name in odd]
