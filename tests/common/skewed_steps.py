"""A router that sends every token to the first experts in chosen steps: these overflow a row budget, the others do not.

As a program it is pretrain_gpt.py with the chosen steps in front:   skewed_steps.py 4,5,7 FLAGS
"""

import sys

import torch

from megatron.training.callbacks.base import Callback
from tests.common.training_runs import train

SKEW = 10.0
"""What a bias on scores between 0 and 1 cannot miss."""


class SkewedSteps(Callback):
    """Raises the expert bias of the first k experts in `steps`, where a captured step reads it, and lowers it after."""

    def __init__(self, steps):
        self.steps = set(steps)

    def on_step_start(self, run):
        if run.state.iteration + 1 in self.steps:
            self._shift(run, SKEW)

    def on_step_end(self, run, result):
        if run.state.iteration in self.steps:
            self._shift(run, -SKEW)

    @torch.no_grad()
    def _shift(self, run, by):
        for chunk in run.model:
            for name, buffer in chunk.named_buffers():
                if name.endswith("expert_bias"):
                    buffer[: run.args.moe_router_topk] += by


if __name__ == "__main__":
    train(" ".join(sys.argv[2:]), [SkewedSteps(int(step) for step in sys.argv[1].split(","))])
