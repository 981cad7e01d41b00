"""Small dense models on the CPU for tests of layers: fp64, no dropout, two layers, unless a test says otherwise."""

import torch
import torch.nn.functional as F

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}


def small_config(**fields) -> TransformerConfig:
    """A configuration of hidden size 32 with 4 heads; `fields` replace or add."""
    defaults = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "device": "cpu",
    }
    if not (fields.get("bf16") or fields.get("fp16")):
        defaults["params_dtype"] = torch.float64
    return TransformerConfig(**{**defaults, **fields})


def small_gpt(config: TransformerConfig, **arguments) -> GPTModel:
    """A GPT with a vocabulary of 32 rows and 16 positions; `arguments` replace or add."""
    defaults = {"vocab_size": 32, "max_sequence_length": 16}
    return GPTModel(config, get_gpt_decoder_block_spec(config), **{**defaults, **arguments})


def random_tokens(batch: int = 2, length: int = 8, vocab_size: int = 32, seed: int = 5):
    """Tokens, positions and labels, each int64 [batch, length]."""
    stream = torch.randint(vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).expand(batch, -1)
    return stream[:, :-1].contiguous(), positions, stream[:, 1:].contiguous()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers from their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
