"""pretrain_gpt.py with one part of the model broken on purpose: the quickstart's verdict must notice.

    ENTRY=tests/functional_tests/broken_quickstart.py bash examples/tiny_moe.sh --break attention|routing

`attention` removes it, so a token sees nothing but itself; `routing` sends every token to experts 0 and 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import pretrain_gpt
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.router import TopKRouter


def without_attention(self, hidden_states, *args, **kwargs):
    """Return zeros in place of the attention output."""
    return torch.zeros_like(hidden_states), None


def first_experts(self, scores):
    """Choose experts 0 .. k-1 for every token."""
    return torch.arange(self.topk, device=scores.device).expand(scores.shape[0], self.topk)


BREAKS = {
    "attention": (SelfAttention, "forward", without_attention),
    "routing": (TopKRouter, "select_experts", first_experts),
}


def main():
    position = sys.argv.index("--break")
    _, which = sys.argv[position : position + 2]
    del sys.argv[position : position + 2]
    setattr(*BREAKS[which])
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
