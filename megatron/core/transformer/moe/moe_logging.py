"""Figures of the routers for the log: balancing losses and load of the experts.

Each MoE layer adds device scalars to its own `LayerMetrics`; nothing is read by the host in a forward or backward pass.
When a log line is due, `MoEMetrics(model_chunks).reduce_and_reset(...)` collects the layers of this rank into one table
[figures, layers], sums it over all ranks of the model and reads it once:

    load_balancing_loss, seq_load_balancing_loss, z_loss   sum over TPxCP, mean over DP, / microbatches, / MoE layers
    global_load_balancing_loss                             sum over TPxDPxCP,            / microbatches, / MoE layers
    moe_load_imbalance                                     busiest expert / mean expert; mean over steps, then layers
    moe_load_imbalance_max                                 the same of the worst layer

Loss values are recorded without their coefficient. A rank without MoE layers takes part with a table of zeros. With
`moe_per_layer_logging`, `moe/<name>_layer_<i>` follows for each MoE layer, i from 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.exact_buffers import ExactBuffersModule
from megatron.core.utils.collectives import all_reduce
from megatron.core.utils.groups import group_size

if TYPE_CHECKING:
    from megatron.core.configs.transformer import TransformerConfig

LOSS_LABELS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
"""Balancing type of the configuration -> name in the log."""

_IMBALANCE = "moe_load_imbalance"
_NUM_STEPS = "num_steps"
_NUM_FORWARDS = "num_forwards"
_FIGURES = (*LOSS_LABELS.values(), _IMBALANCE, _NUM_STEPS, _NUM_FORWARDS)


class LayerMetrics(ExactBuffersModule):
    """Sums of one MoE layer since the last log line, on the device."""

    def __init__(self, layer_number: int | None) -> None:
        super().__init__()
        self.layer_number = layer_number or 1
        """1-based, as upstream counts layers."""
        self.sums: torch.Tensor
        self.register_buffer("sums", torch.zeros(len(_FIGURES), dtype=torch.float32), persistent=False)

    def add(self, figure: str, value: torch.Tensor | float) -> None:
        """Add a scalar [] to one figure. Host: no synchronisation."""
        self.sums[_FIGURES.index(figure)].add_(value)

    def add_forward(self) -> None:
        """Count one training forward pass, which marks this layer as a MoE layer in the table."""
        self.add(_NUM_FORWARDS, 1.0)

    def add_step_load(self, tokens_per_expert: torch.Tensor) -> None:
        """Add the load of one step, int64 [E], summed over all ranks that hold tokens of this layer."""
        load = tokens_per_expert.to(torch.float32)
        self.add(_IMBALANCE, load.max() / load.mean().clamp(min=1e-20))
        self.add(_NUM_STEPS, 1.0)


class MoEMetrics:
    """The figures of all MoE layers of a model."""

    def __init__(self, model_chunks: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
        chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
        self.config = _find_config(chunks)
        self.layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LayerMetrics)]
        tensors = (tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        """That of the model, on a rank without MoE layers too: the ranks' tables meet in one collective."""

    @torch.no_grad()
    def reduce_and_reset(
        self, num_microbatches: int, pg_collection: ProcessGroupCollection | None = None
    ) -> dict[str, float]:
        """Means per microbatch over everything since the last call, by name; sums start again from zero.

        Collective over PP and TPxDPxCP: every rank of the model calls it, also one without MoE layers. An empty answer
        for a dense model needs no communication.
        """
        if self.config is None or not self.config.num_moe_experts:
            return {}
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        return self.reset_and_summarise(self.reduce(groups).tolist(), num_microbatches, groups)

    @torch.no_grad()
    def reduce(self, groups: ProcessGroupCollection) -> torch.Tensor:
        """Everything since the last reset, summed over all ranks, for `reset_and_summarise`: fp32 [n] on the device.

        Collective over PP and TPxDPxCP; nothing, [0], for a dense model. Host: no synchronisation. Graph: capturable.
        """
        if self.config is None or not self.config.num_moe_experts:
            return torch.zeros(0, device=self.device)
        table = self._local_table()
        for group in (groups.pp, groups.tp_dp_cp):
            all_reduce(table, group)
        return table.flatten()

    @torch.no_grad()
    def reset_and_summarise(
        self, sums: Sequence[float], num_microbatches: int, groups: ProcessGroupCollection
    ) -> dict[str, float]:
        """Means per microbatch from what `reduce` gave, by name; sums start again from zero."""
        if self.layers:
            torch._foreach_zero_([layer.sums for layer in self.layers])
        num_columns = len(sums) // len(_FIGURES)
        table = [list(sums[i * num_columns : (i + 1) * num_columns]) for i in range(len(_FIGURES))]
        return self._summarise(table, num_microbatches, groups)

    def _local_table(self) -> torch.Tensor:
        """fp32 [figures, layers] on the device of the model."""
        assert self.config is not None, "a table needs the configuration of the model"
        num_columns = max(self.config.num_layers, *(layer.layer_number for layer in self.layers), 1)
        table = torch.zeros(len(_FIGURES), num_columns, device=self.device)
        for layer in self.layers:
            table[:, layer.layer_number - 1] += layer.sums
        return table

    def _summarise(
        self, table: list[list[float]], num_microbatches: int, groups: ProcessGroupCollection
    ) -> dict[str, float]:
        rows = dict(zip(_FIGURES, table, strict=True))
        moe_layers = [i for i, count in enumerate(rows[_NUM_FORWARDS]) if count > 0]
        figures: dict[str, float] = {}
        if not moe_layers or self.config is None:
            return figures
        per_layer: dict[str, list[float]] = {}
        for kind in _active_kinds(self.config):
            replicas = 1 if kind == "global_aux_loss" else group_size(groups.dp)
            divisor = num_microbatches * replicas
            per_layer[LOSS_LABELS[kind]] = [rows[LOSS_LABELS[kind]][i] / divisor for i in moe_layers]
        if all(rows[_NUM_STEPS][i] > 0 for i in moe_layers):
            per_layer[_IMBALANCE] = [rows[_IMBALANCE][i] / rows[_NUM_STEPS][i] for i in moe_layers]
            figures[f"{_IMBALANCE}_max"] = max(per_layer[_IMBALANCE])
        for name, values in per_layer.items():
            figures[name] = sum(values) / len(values)
            if self.config.moe_per_layer_logging:
                figures.update({f"moe/{name}_layer_{i}": x for i, x in zip(moe_layers, values, strict=True)})
        return figures


def _active_kinds(config: "TransformerConfig") -> Iterator[str]:
    for kind, coeff in zip(config.balancing_types, config.aux_loss_coefficients, strict=True):
        if kind in LOSS_LABELS and coeff:
            yield kind
    if config.moe_z_loss_coeff:
        yield "z_loss"


def _find_config(chunks: list[torch.nn.Module]) -> Any:
    """The model configuration, taken from the first module that carries one."""
    configs = (getattr(module, "config", None) for chunk in chunks for module in chunk.modules())
    return next((config for config in configs if hasattr(config, "num_moe_experts")), None)
