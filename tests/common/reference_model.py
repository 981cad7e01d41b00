"""The GPT MoE model in plain fp64 formulas: loops over layers, samples, heads, tokens and chosen experts.

Legend: b samples of a microbatch, s positions, h width, H query heads, G query groups, d head dimension.
"""

import math
from dataclasses import dataclass

import torch

from tests.common.reference_router import route


@dataclass(frozen=True)
class GptShape:
    """What the model needs besides its TransformerConfig; fields as upstream's GPTModel arguments."""

    vocab_size: int = 32
    max_sequence_length: int = 16
    position_embedding_type: str = "rope"
    rotary_percent: float = 1.0
    rotary_base: int = 10000
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    share_embeddings_and_output_weights: bool = False


def is_moe_layer(config, layer):
    """True if the 0-based `layer` routes its tokens."""
    if config.num_moe_experts is None:
        return False
    freq = config.moe_layer_freq
    return layer % freq == 0 if isinstance(freq, int) else bool(freq[layer])


def parameter_shapes(config, shape):
    """{global name: full shape} of every parameter."""
    h, d = config.hidden_size, config.kv_channels
    heads, groups = config.num_attention_heads, config.num_query_groups
    norm_parts = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    names = {"embedding.word_embeddings.weight": (shape.vocab_size, h)}
    if shape.position_embedding_type == "learned_absolute":
        names["embedding.position_embeddings.weight"] = (shape.max_sequence_length, h)
    for layer in range(config.num_layers):
        at = f"decoder.layers.{layer}"
        for part in norm_parts:
            names[f"{at}.input_layernorm.{part}"] = (h,)
            names[f"{at}.pre_mlp_layernorm.{part}"] = (h,)
            if config.qk_layernorm:
                names[f"{at}.self_attention.q_layernorm.{part}"] = (d,)
                names[f"{at}.self_attention.k_layernorm.{part}"] = (d,)
        names[f"{at}.self_attention.linear_qkv.weight"] = ((heads + 2 * groups) * d, h)
        if config.add_qkv_bias or config.add_bias_linear:
            names[f"{at}.self_attention.linear_qkv.bias"] = ((heads + 2 * groups) * d,)
        names[f"{at}.self_attention.linear_proj.weight"] = (h, heads * d)
        if config.add_bias_linear:
            names[f"{at}.self_attention.linear_proj.bias"] = (h,)
        names.update(_moe_shapes(config, at) if is_moe_layer(config, layer) else _mlp_shapes(config, at))
    for part in norm_parts:
        names[f"decoder.final_layernorm.{part}"] = (h,)
    if not shape.share_embeddings_and_output_weights:
        names["output_layer.weight"] = (shape.vocab_size, h)
    return names


def _mlp_shapes(config, at):
    h, f, two = config.hidden_size, config.ffn_hidden_size, 2 if config.gated_linear_unit else 1
    names = {f"{at}.mlp.linear_fc1.weight": (two * f, h), f"{at}.mlp.linear_fc2.weight": (h, f)}
    if config.add_bias_linear:
        names |= {f"{at}.mlp.linear_fc1.bias": (two * f,), f"{at}.mlp.linear_fc2.bias": (h,)}
    return names


def _moe_shapes(config, at):
    h, f, two = config.hidden_size, config.moe_ffn_hidden_size, 2 if config.gated_linear_unit else 1
    names = {f"{at}.mlp.router.weight": (config.num_moe_experts, h)}
    for e in range(config.num_moe_experts):
        names[f"{at}.mlp.experts.linear_fc1.weight{e}"] = (two * f, h)
        names[f"{at}.mlp.experts.linear_fc2.weight{e}"] = (h, f)
        if config.add_bias_linear:
            names[f"{at}.mlp.experts.linear_fc1.bias{e}"] = (two * f,)
            names[f"{at}.mlp.experts.linear_fc2.bias{e}"] = (h,)
    if config.moe_shared_expert_intermediate_size is not None:
        g = config.moe_shared_expert_intermediate_size
        names[f"{at}.mlp.shared_experts.linear_fc1.weight"] = (two * g, h)
        names[f"{at}.mlp.shared_experts.linear_fc2.weight"] = (h, g)
        if config.moe_shared_expert_gate:
            names[f"{at}.mlp.shared_experts.gate_weight"] = (1, h)
    return names


class ReferenceModel:
    """Holds the weights {global name: tensor} and runs one microbatch."""

    def __init__(self, config, shape, weights, expert_bias, plan):
        self.config, self.shape, self.weights, self.expert_bias, self.plan = config, shape, weights, expert_bias, plan

    def token_losses(self, tokens, labels, sample_ids):
        """tokens, labels int64 [b, s] -> losses [b, s] and {layer: Routing}."""
        x = [self._embed(row) for row in tokens]
        routings = {}
        for layer in range(self.config.num_layers):
            at = f"decoder.layers.{layer}"
            x = [v + self._attention(self._norm(v, f"{at}.input_layernorm"), f"{at}.self_attention") for v in x]
            normed = [self._norm(v, f"{at}.pre_mlp_layernorm") for v in x]
            if is_moe_layer(self.config, layer):
                added, routings[layer] = self._moe(normed, layer, sample_ids)
            else:
                added = [self._mlp(v, f"{at}.mlp.", "") for v in normed]
            x = [v + a for v, a in zip(x, added, strict=True)]
        tied = self.shape.share_embeddings_and_output_weights
        output = self.weights["embedding.word_embeddings.weight" if tied else "output_layer.weight"]
        logits = [self._norm(v, "decoder.final_layernorm") @ output.T for v in x]
        losses = [
            torch.logsumexp(lg, 1) - lg[torch.arange(len(row)), row] for lg, row in zip(logits, labels, strict=True)
        ]
        return torch.stack(losses), routings

    def _embed(self, row):
        x = self.weights["embedding.word_embeddings.weight"][row]
        if self.shape.position_embedding_type == "learned_absolute":
            x = x + self.weights["embedding.position_embeddings.weight"][: len(row)]
        return x

    def _norm(self, x, at):
        weight = self.weights[f"{at}.weight"] + (1.0 if self.config.layernorm_zero_centered_gamma else 0.0)
        eps = self.config.layernorm_epsilon
        if self.config.normalization == "RMSNorm":
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * weight + self.weights[f"{at}.bias"]

    def _linear(self, x, at, suffix=""):
        y = x @ self.weights[f"{at}.weight{suffix}"].T
        bias = self.weights.get(f"{at}.bias{suffix}")
        return y if bias is None else y + bias

    def _attention(self, x, at):
        """x [s, h] -> [s, h]; rows of linear_qkv are, group by group, its query heads, its key, its value."""
        d, groups = self.config.kv_channels, self.config.num_query_groups
        per_group = self.config.num_attention_heads // groups
        qkv = self._linear(x, f"{at}.linear_qkv")
        outputs = []
        for g in range(groups):
            start = g * (per_group + 2) * d
            heads = [qkv[:, start + i * d : start + (i + 1) * d] for i in range(per_group + 2)]
            queries, key, value = heads[:per_group], heads[-2], heads[-1]
            if self.config.qk_layernorm:
                queries = [self._norm(q, f"{at}.q_layernorm") for q in queries]
                key = self._norm(key, f"{at}.k_layernorm")
            key = self._rotate(key)
            for q in queries:
                scores = self._rotate(q) @ key.T / math.sqrt(d)
                future = torch.triu(torch.ones(len(x), len(x), dtype=torch.bool), 1)
                weights = torch.exp(scores.masked_fill(future, -math.inf) - scores.detach().max())
                outputs.append(weights / weights.sum(1, keepdim=True) @ value)
        return self._linear(torch.cat(outputs, 1), f"{at}.linear_proj")

    def _rotate(self, x):
        """Rotary embedding of x [s, d]: the first rotary_percent of the head turns pairwise with the position."""
        if self.shape.position_embedding_type != "rope":
            return x
        turned = int(x.shape[1] * self.shape.rotary_percent)
        columns = list(x.T)
        for i in range(turned // 2):
            interleaved = self.config.rotary_interleaved
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + turned // 2)
            angle = torch.arange(len(x), dtype=x.dtype) * self._frequency(i, turned)
            left, right = x[:, a], x[:, b]
            columns[a] = left * torch.cos(angle) - right * torch.sin(angle)
            columns[b] = right * torch.cos(angle) + left * torch.sin(angle)
        return torch.stack(columns, 1)

    def _frequency(self, i, turned):
        """Angular frequency of pair i, stretched as Llama 3.1 does when rope_scaling is on."""
        freq = self.shape.rotary_base ** (-2 * i / turned)
        if not self.shape.rope_scaling:
            return freq
        low, high, original = 1.0, 4.0, 8192
        turns = original * freq / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - smooth) * freq / self.shape.rope_scaling_factor + smooth * freq

    def _activate(self, x):
        if not self.config.gated_linear_unit:
            return self.config.activation_func(x)
        half = x.shape[-1] // 2
        return self.config.activation_func(x[..., :half]) * x[..., half:]

    def _mlp(self, x, at, suffix):
        return self._linear(self._activate(self._linear(x, f"{at}linear_fc1", suffix)), f"{at}linear_fc2", suffix)

    def _moe(self, normed, layer, sample_ids):
        """normed: b tensors [s, h] -> b tensors [s, h] and the Routing; rows run position by position."""
        at = f"decoder.layers.{layer}.mlp"
        s, b = len(normed[0]), len(normed)
        rows = torch.stack([normed[i][t] for t in range(s) for i in range(b)])
        samples = torch.tensor([sample_ids[i] for _ in range(s) for i in range(b)])
        positions = torch.tensor([t for t in range(s) for _ in range(b)])
        forced = None if self.plan is None else self.plan(layer, samples * s + positions)
        bias = None if self.expert_bias is None else self.expert_bias[layer]
        logits = rows @ self.weights[f"{at}.router.weight"].T
        routing = route(logits, self.config, samples, forced, bias)
        outputs = []
        for t, row in enumerate(rows):
            y = torch.zeros_like(row)
            for e in routing.routing_map[t].nonzero().flatten().tolist():
                y = y + self._expert(row, routing.probs[t, e], f"{at}.experts.", e)
            outputs.append(y + self._shared(row, at))
        return [torch.stack(outputs[i::b]) for i in range(b)], routing

    def _expert(self, row, prob, at, e):
        """The probability multiplies the hidden activation and the output bias, or the input."""
        if self.config.moe_apply_probs_on_input:
            return self._mlp(row * prob, at, e)
        hidden = self._activate(self._linear(row, f"{at}linear_fc1", e)) * prob
        y = hidden @ self.weights[f"{at}linear_fc2.weight{e}"].T
        bias = self.weights.get(f"{at}linear_fc2.bias{e}")
        return y if bias is None else y + bias * prob

    def _shared(self, row, at):
        if self.config.moe_shared_expert_intermediate_size is None:
            return 0.0
        y = self._mlp(row, f"{at}.shared_experts.", "")
        gate = self.weights.get(f"{at}.shared_experts.gate_weight")
        return y if gate is None else y * torch.sigmoid((row * gate[0]).sum())
