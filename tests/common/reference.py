"""The right answer of one training step: loss, every gradient, every auxiliary term and counter, in fp64.

One process and no collective; `reference_model` and `reference_router` hold the formulas, this file the step around
them: how a global batch falls into microbatches and data parallel ranks, and what is averaged over what.
"""

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tests.common.forced_router import Plan
from tests.common.reference_model import GptShape, ReferenceModel, parameter_shapes
from tests.common.reference_router import step_losses

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Batch:
    """The samples of one step: tokens, labels int64 [n, s], loss_mask [n, s]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor

    @classmethod
    def random(cls, num_samples: int, seq_length: int, vocab_size: int, seed: int) -> "Batch":
        """Random tokens, nothing masked."""
        generator = torch.Generator().manual_seed(seed)
        stream = torch.randint(vocab_size, (num_samples, seq_length + 1), generator=generator)
        mask = torch.ones(num_samples, seq_length, dtype=torch.float64)
        return cls(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), mask)


@dataclass
class StepResult:
    """What a step produced; of the reference or of a layout under test."""

    loss: float
    """sum of token losses / number of tokens, over the whole batch."""
    grads: dict[str, torch.Tensor]
    """Gradient before clipping, by global name, full shape."""
    aux: dict[str, float] = field(default_factory=dict)
    """Logged auxiliary losses: mean over microbatches, data parallel ranks and MoE layers, without coefficient."""
    routing_maps: dict[int, torch.Tensor] = field(default_factory=dict)
    """{layer: bool [n * s, E]} by global token id."""
    tokens_per_expert: dict[int, torch.Tensor] = field(default_factory=dict)
    """{layer: int64 [E]}, over the whole batch, after drops."""
    expert_bias: dict[int, torch.Tensor] = field(default_factory=dict)
    """{layer: [E]} after the step."""
    grad_norm: float | None = None
    """L2 norm over all parameters."""
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters after the step, by global name; of a layout under test only."""
    logs: list = field(default_factory=list)
    """Collective records of every rank; of a layout under test only."""
    counters: Counter = field(default_factory=Counter)
    """What the schedule of rank 0 did; of a layout under test only."""


def make_weights(config, shape: GptShape, seed: int, std: float = 0.15) -> dict[str, torch.Tensor]:
    """{global name: fp64 tensor}, each drawn from its own name and the seed. Norm weights lie around one."""
    weights = {}
    for name, size in parameter_shapes(config, shape).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        values = torch.randn(size, generator=generator, dtype=torch.float64) * std
        is_norm_weight = "layernorm.weight" in name and not config.layernorm_zero_centered_gamma
        weights[name] = values + 1.0 if is_norm_weight else values
    # Spread the routers' logits, so that no choice hangs on a rounding error.
    return {name: w * 6.0 if name.endswith("router.weight") else w for name, w in weights.items()}


def reference_step(
    config,
    shape: GptShape,
    batch: Batch,
    weights: Mapping[str, torch.Tensor],
    *,
    data_parallel_size: int = 1,
    micro_batch_size: int = 1,
    plan: Plan | None = None,
    expert_bias: Mapping[int, torch.Tensor] | None = None,
) -> StepResult:
    """One step on `batch`, cut as data parallel ranks would: microbatch m of rank d is block m * dp + d of samples."""
    leaves = {name: w.detach().double().clone().requires_grad_() for name, w in weights.items()}
    bias = None
    if config.moe_router_enable_expert_bias:
        zero = torch.zeros(config.num_moe_experts, dtype=torch.float64)
        bias = {layer: (expert_bias or {}).get(layer, zero) for layer in range(config.num_layers)}
    model = ReferenceModel(config, shape, leaves, bias, plan)
    num_samples, seq_length = batch.tokens.shape
    blocks = num_samples // micro_batch_size
    num_microbatches = blocks // data_parallel_size
    sums, counts, routings = [], [], []
    for block in range(blocks):
        ids = list(range(block * micro_batch_size, (block + 1) * micro_batch_size))
        losses, layers = model.token_losses(batch.tokens[ids], batch.labels[ids], ids)
        mask = batch.loss_mask[ids].double()
        sums.append((losses * mask).sum())
        counts.append(mask.sum())
        routings.append(layers)
    loss = torch.stack(sums).sum() / torch.stack(counts).sum()
    if config.calculate_per_token_loss:
        aux_scale = micro_batch_size * seq_length / max(float(sum(counts)), 1.0)
        objective = torch.stack(sums).sum() / max(float(sum(counts)), 1.0)
    else:
        aux_scale = 1.0 / blocks
        objective = sum(s / max(float(n), 1.0) for s, n in zip(sums, counts, strict=True)) / blocks
    coefficients = dict(zip(config.balancing_types, config.aux_loss_coefficients, strict=True))
    coefficients["z_loss"] = config.moe_z_loss_coeff or 0.0
    logged: dict[str, list[float]] = {}
    for layer in routings[0]:
        rows = [[routings[m * data_parallel_size + d][layer] for d in range(data_parallel_size)]
                for m in range(num_microbatches)]  # fmt: skip
        for name, values in step_losses(rows, config).items():
            if coefficients[name]:
                total = torch.stack([value for row in values for value in row]).sum()
                objective = objective + coefficients[name] * aux_scale * total
                # The terms of a global loss add up over the data parallel ranks, the others are averaged.
                divisor = num_microbatches if name == "global_aux_loss" else blocks
                logged.setdefault(name, []).append(float(total.detach()) / divisor)
    found = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    grads = {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(leaves.items(), found, strict=True)}
    maps = {layer: _by_token(routings, layer, micro_batch_size, seq_length) for layer in routings[0]}
    load = {layer: routing_map.sum(0) for layer, routing_map in maps.items()}
    return StepResult(
        loss=float(loss.detach()),
        grads=grads,
        aux={name: sum(values) / len(values) for name, values in logged.items()},
        routing_maps=maps,
        tokens_per_expert=load,
        expert_bias={} if bias is None else {layer: _moved(bias[layer], load[layer], config) for layer in load},
        grad_norm=float(torch.sqrt(sum((g**2).sum() for g in grads.values()))),
    )


def _by_token(routings, layer, micro_batch_size, seq_length):
    """Join the maps of all blocks, whose rows run position by position, into [n * s, E] by global token id."""
    maps = []
    for layers in routings:
        rows = layers[layer].routing_map
        maps.append(rows.view(seq_length, micro_batch_size, -1).transpose(0, 1).reshape(rows.shape))
    return torch.cat(maps)


def _moved(bias, counts, config):
    """The expert bias after the step: up for experts below the mean load, down for those above."""
    counts = counts.double()
    return bias + config.moe_router_bias_update_rate * torch.sign(counts.mean() - counts)


def assert_matches(reference: StepResult, got: StepResult, tolerance: float = TOLERANCE) -> None:
    """Compare every gradient, then loss, norm, auxiliary terms and counters; relative to the reference's size."""
    assert sorted(reference.grads) == sorted(got.grads), (
        f"names differ: missing {sorted(set(reference.grads) - set(got.grads))}, "
        f"unexpected {sorted(set(got.grads) - set(reference.grads))}"
    )
    errors = sorted(((_error(g, got.grads[name]), name) for name, g in reference.grads.items()), reverse=True)
    worst = [(error, name) for error, name in errors if not error <= tolerance][:5]
    assert not worst, "gradients differ (relative error, norm of got / reference):\n" + "\n".join(
        f"  {name}: {error:.3g}, {_ratio(reference.grads[name], got.grads[name])}" for error, name in worst
    )
    scalars = {"loss": (reference.loss, got.loss)}
    if got.grad_norm is not None:
        scalars["grad_norm"] = (reference.grad_norm, got.grad_norm)
    assert sorted(reference.aux) == sorted(got.aux), f"logged terms {sorted(reference.aux)} and {sorted(got.aux)}"
    for name, (expected, value) in scalars.items():
        assert abs(value - expected) <= tolerance * abs(expected), f"{name}: expected {expected!r}, got {value!r}"
    for name, expected in reference.aux.items():
        # Logged values are collected in fp32 in every run: an ulp for each sum on the way.
        assert abs(got.aux[name] - expected) <= 1e-6 * abs(expected), f"{name}: expected {expected}, {got.aux[name]}"
    for name in ("routing_maps", "tokens_per_expert"):
        for layer, expected in getattr(reference, name).items():
            value = getattr(got, name)[layer]
            assert torch.equal(expected.long(), value.long()), f"{name} of layer {layer}: {expected} and {value}"
    for layer, expected in reference.expert_bias.items():
        value = got.expert_bias[layer].double()
        # The buffer is fp32 in every run, hence half an ulp of the bias per addition.
        assert torch.allclose(expected.double(), value, rtol=1e-6, atol=1e-9), (
            f"bias of layer {layer}: {expected} and {value}"
        )


def _error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Largest difference relative to the largest element; NaN becomes infinite."""
    assert expected.shape == got.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    scale = float(expected.abs().max())
    difference = float((expected - got.double()).abs().max())
    if difference != difference:
        return float("inf")
    return difference / scale if scale > 0 else difference


def _ratio(expected: torch.Tensor, got: torch.Tensor) -> str:
    """The ratio of norms: 2 or 1/2 points at a divisor, 0 at a missing reduction, NaN at memory read too late."""
    size = float(expected.norm())
    return f"{float(got.double().norm()) / size:.6g}" if size > 0 else f"{float(got.double().norm()):.6g} / 0"
