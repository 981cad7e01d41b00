"""Steps of a small MoE model on one rank under the combined schedule, for tests of streams and lifetimes.

model = overlapped_model(is_shuffled=True)
grads = run_microbatches(model, 3)              {name: gradient}, from forwards and backwards in pairs
grads = run_microbatches(model, 3, overlap=False)
"""

from collections import Counter
from collections.abc import Sequence

import torch

from megatron.core.deferred_wgrad import active_queue
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.grouped_mlp import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.local_exchange import use_local_exchange
from tests.common.moe_layers import moe_config

VOCAB_SIZE, LENGTH, MAX_LENGTH = 32, 8, 512
Batch = dict[str, torch.Tensor]


def overlapped_model(
    is_shuffled: bool = False, counts_late: bool = False, shadow: bool = False, device: str = "cpu", **fields
) -> GPTModel:
    """Two MoE layers with an exchange double; `shadow` gives them experts that save a byte copy of their input.

    A dispatcher that is named in `fields` stays as it is.
    """
    defaults = {"num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_grouped_gemm": True}
    config = moe_config(**{**defaults, "device": device, **fields})
    model = GPTModel(config, get_gpt_decoder_block_spec(config), vocab_size=VOCAB_SIZE, max_sequence_length=MAX_LENGTH)
    if shadow:
        for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
            layer.experts = ShadowedExperts(layer.experts)
    if "moe_token_dispatcher_type" not in fields:
        use_local_exchange(model, is_shuffled, counts_late)
    return model.to(device)


def run_microbatches(
    model: GPTModel, num_microbatches: int = 3, overlap: bool = True, delays_wgrad: bool = False, lengths=None
) -> dict[str, torch.Tensor]:
    """One step without optimizer; microbatch i has `lengths[i]` tokens. Returns all gradients."""
    device = next(model.parameters()).device
    run_step(model, make_batches(lengths or [LENGTH] * num_microbatches, device), overlap, delays_wgrad)
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def run_step(model: GPTModel, batches: Sequence[Batch], overlap: bool = True, delays_wgrad: bool = False) -> None:
    """Forward and backward over batches on the model's device; gradients are those of this step. Graph: capturable."""
    config = model.config
    config.overlap_moe_expert_parallel_comm, config.delay_wgrad_compute = overlap, overlap and delays_wgrad
    counters: Counter[str] = Counter()
    config.count_func = counters.update

    def forward_step(iterator, model):
        batch = next(iterator)
        positions = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device).expand(2, -1)
        losses = model(batch["tokens"], positions, None, labels=batch["labels"])
        return losses, lambda output: (output.sum(), torch.full((), output.numel(), device=output.device), {})

    model.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=len(batches)
    )
    assert (counters["pairs overlapped"] > 0) == (overlap and len(batches) > 1), f"{counters}"


def make_batches(lengths: Sequence[int], device: torch.device | str = "cpu", seed: int = 0) -> list[Batch]:
    """Tokens and labels of each microbatch, int64 [2, length]."""
    batches = []
    for number, length in enumerate(lengths, start=seed):
        generator = torch.Generator().manual_seed(number)
        stream = torch.randint(VOCAB_SIZE, (2, length + 1), generator=generator).to(device)
        batches.append({"tokens": stream[:, :-1].contiguous(), "labels": stream[:, 1:].contiguous()})
    return batches


def assert_equal_bits(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """Fail with the names of the gradients that differ."""
    different = [name for name, grad in expected.items() if not torch.equal(grad, got[name])]
    assert not different, f"gradients differ: {different}"


class ShadowedExperts(torch.nn.Module):
    """Experts behind a layer that keeps one byte per element of its input for backward, as low precision would.

    Backward and the delayed part of it read the row counts on the device.
    """

    saves_rows = False

    def __init__(self, experts: GroupedMLP) -> None:
        super().__init__()
        self.experts = experts
        self.counts_seen: list[torch.Tensor] = []
        """What the delayed part of each backward read, int64 [n]."""

    def forward(self, rows, tokens_per_expert, probs, host_tokens_per_expert=None):
        rows = _Shadow.apply(rows, tokens_per_expert, self.counts_seen)
        return self.experts(rows, tokens_per_expert, probs, host_tokens_per_expert)


class _Shadow(torch.autograd.Function):
    """rows [R, h] * 2; the gradient is lost if the counts in backward are not those of the rows."""

    @staticmethod
    def forward(ctx, rows, counts, seen):
        ctx.save_for_backward((rows > 0).to(torch.uint8), counts)
        ctx.queue, ctx.seen = active_queue(), seen
        return rows * 2

    @staticmethod
    def backward(ctx, grad):
        shadow, counts = ctx.saved_tensors
        if ctx.queue is not None:
            ctx.queue.put([], lambda: ctx.seen.append(counts.clone()))
        return grad * torch.where(counts.sum() == shadow.shape[0], 2, 0), None, None
