"""Fields of TransformerConfig that several flags decide together."""

import argparse
from typing import Any

import torch.nn.functional as F

from megatron.core.utils.activations import squared_relu


def model_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The activation from --swiglu and --squared-relu, query groups only with group-query attention."""
    overrides: dict[str, Any] = {"gated_linear_unit": bool(args.swiglu), "activation_func": F.gelu}
    if args.swiglu:
        overrides["activation_func"] = F.silu
    elif args.squared_relu:
        overrides["activation_func"] = squared_relu
    if not args.group_query_attention:
        overrides["num_query_groups"] = None
    overrides["bias_activation_fusion"] = args.bias_gelu_fusion and args.add_bias_linear
    return overrides
