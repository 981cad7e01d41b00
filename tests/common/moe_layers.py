"""Small MoE configurations and experts with a closed form, for tests of router, dispatchers and layer."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules


def moe_config(**fields) -> TransformerConfig:
    """One layer of width 16, 4 experts of width 24, top-2, fp64, SwiGLU without bias; `fields` replace or add."""
    defaults = {
        "num_layers": 1,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_flex_dispatcher_backend": "hybridep",
        "device": "cpu",
    }
    if not (fields.get("bf16") or fields.get("fp16")):
        defaults["params_dtype"] = torch.float64
    return TransformerConfig(**{**defaults, **fields})


def ep_groups() -> ProcessGroupCollection:
    """All ranks as one expert-parallel group, each a data-parallel replica."""
    world = dist.group.WORLD
    return ProcessGroupCollection(ep=world, tp_ep=world, dp=world, dp_cp=world, tp_dp_cp=world, world=world)


class ScalingExperts(torch.nn.Module):
    """Expert e multiplies its rows by e + 1 and by their probability."""

    def __init__(self, num_local_experts, config, pg_collection=None):
        super().__init__()
        self.first = (pg_collection.ep.rank() if pg_collection.ep is not None else 0) * num_local_experts
        self.seen = []

    def forward(self, rows, tokens_per_expert, probs, host_tokens_per_expert=None):
        counts = tokens_per_expert.tolist()
        assert host_tokens_per_expert in (None, counts), f"host {host_tokens_per_expert}, device {counts}"
        assert sum(counts) == len(rows) == len(probs), f"{counts} for {len(rows)} rows"
        self.seen.append((rows, probs))
        factors = torch.repeat_interleave(torch.arange(len(counts)) + self.first + 1.0, tokens_per_expert)
        return (rows * (factors * probs).unsqueeze(-1)).to(rows.dtype), None


def scaling_layer(config: TransformerConfig, groups: ProcessGroupCollection | None = None) -> MoELayer:
    """A layer whose output is known: token x comes out as x * sum over its experts of p * (e + 1)."""
    return MoELayer(config, MoESubmodules(experts=ScalingExperts), layer_number=1, pg_collection=groups)


def expected_scaling(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Closed form of `scaling_layer`: hidden [s, b, h], probs [T, E] -> [s, b, h]."""
    factors = (probs * (torch.arange(probs.shape[1]) + 1.0)).sum(dim=1)
    return (hidden.flatten(0, -2) * factors.unsqueeze(-1)).view_as(hidden).to(hidden.dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers from a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
