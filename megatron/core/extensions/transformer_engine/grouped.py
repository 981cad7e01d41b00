"""The matrices of a rank's experts as one grouped module of Transformer Engine, in place of `GroupedLinear`.

    rows of expert 0 | rows of expert 1 | ...   x   weight0, weight1, ...   ->   the same rows, other width

The library cuts the rows by counts on the host, and takes exactly the rows that the counts cover. Rows behind them are
not read; what is returned there is zero.

Legend: R rows sorted by expert, n experts of this rank.
"""

from typing import Any

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.extensions.transformer_engine.module import NUM_FP8_ROWS, EngineLayer
from megatron.core.module_api.parameter import new_parameter
from megatron.core.param_attrs import InitSpec, ParamAttrs
from megatron.core.tensor_parallel.recompute import recomputes


class TEGroupedLinear(EngineLayer):
    """n linear layers of one shape; expert i has `weight{i}` [out, in] and, with a bias, `bias{i}` [out].

    Args:
        is_behind_activation: The rows are the result of the experts' activation, which may be recomputed.
    """

    needs_host_counts = True
    """A forward waits for the host to read how many rows each expert has."""

    def __init__(
        self,
        config: TransformerConfig,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        weight_attrs: ParamAttrs,
        has_bias: bool,
        allreduce: bool,
    ) -> None:
        super().__init__(config, num_gemms=num_experts)
        self.num_experts, self.has_bias = num_experts, has_bias
        arguments = self.common_arguments()
        # the second matrix alone is cut along its input; the rows in front of it are an activation
        self.keeps_original = self._keeps_original(weight_attrs.partition_dim == 1)
        if self.keeps_original:
            arguments["save_original_input"] = True
        engine = self.library.root.pytorch.GroupedLinear(num_experts, in_features, out_features, **arguments)
        self.adopt(engine, {f"weight{i}": weight_attrs for i in range(num_experts)}, allreduce)
        for i in range(num_experts if has_bias else 0):
            attrs = ParamAttrs(InitSpec("zeros"), is_expert=True)  # experts with biases are not split over ETP
            self.register_parameter(f"bias{i}", new_parameter(config, (out_features,), attrs, allreduce=allreduce))

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """N parameters [out, in]."""
        return [self._parameters[f"weight{i}"] for i in range(self.num_experts)]  # type: ignore[misc]

    @property
    def biases(self) -> list[torch.nn.Parameter]:
        """N parameters [out]; only with a bias."""
        return [self._parameters[f"bias{i}"] for i in range(self.num_experts)]  # type: ignore[misc]

    @property
    def saves_rows(self) -> bool:
        """Whether autograd keeps the rows that are given: not where it keeps FP8 codes of them."""
        return self.fp8 is None or self.keeps_original

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, host_counts: list[int] | None = None
    ) -> torch.Tensor:
        """Multiply each group of rows by its expert's matrix, no bias: [R, in], int [n] -> [R, out].

        Host: one wait for the counts on a GPU, unless they are given on the host.
        """
        counts = tokens_per_expert.tolist() if host_counts is None else host_counts
        num_rows = sum(counts)
        tail = rows.shape[0] - num_rows
        output: Any = self.run_engine(rows[:num_rows] if tail else rows, counts) if num_rows else self._run_empty(rows)
        return torch.cat([output, output.new_zeros(tail, output.shape[1])]) if tail else output

    def _run_empty(self, rows: torch.Tensor) -> torch.Tensor:
        """No rows of [R, in] -> [0, out] by way of a block of zeros, so that all matrices get gradients of zeros."""
        block = torch.nn.functional.pad(rows[:0], (0, 0, 0, NUM_FP8_ROWS))
        return self.run_engine(block, [NUM_FP8_ROWS] + [0] * (self.num_experts - 1))[:0]

    def _keeps_original(self, is_behind_activation: bool) -> bool:
        """True if codes of the rows should be made again in backward, because the rows are."""
        has_codes = self.fp8 is not None and not self.fp8.setup.recipe.uses_history
        makes_again = is_behind_activation and recomputes(self.config, "moe_act")
        return has_codes and makes_again and self.library.has("save_original_input")
