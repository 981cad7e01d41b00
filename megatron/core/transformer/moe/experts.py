"""The experts of a rank one after the other: the reference for the grouped form, and upstream's import path for both.

Legend: R rows sorted by expert, h width, n experts of this rank.
"""

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.module import MegatronModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.expert_names import ExpertNumbering, is_reduced_like_dense
from megatron.core.transformer.moe.grouped_mlp import GroupedMLP, activate_experts, add_weighted_bias

__all__ = ["GroupedMLP", "SequentialMLP"]


class SequentialMLP(ExpertNumbering, MegatronModule):
    """A list of MLPs. Same names, same weights and same results as `GroupedMLP`."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build n experts; `submodules` are the specs of each one's linear layers."""
        super().__init__(config)
        groups = self.number_experts(num_local_experts, pg_collection)
        specs = MLPSubmodules() if submodules is None else submodules
        self.local_experts = torch.nn.ModuleList(
            MLP(
                config,
                specs,
                is_expert=True,
                ffn_hidden_size=config.moe_ffn_hidden_size,
                tp_group=groups.expt_tp,
            )
            for _ in range(num_local_experts)
        )
        for param in self.parameters():
            param.allreduce = is_reduced_like_dense(groups)  # type: ignore[attr-defined]

    @property
    def saves_rows(self) -> bool:
        """Whether autograd keeps the rows that are given: not where it keeps FP8 codes of them."""
        return self.config.fp8 is None or self.config.moe_apply_probs_on_input or not self.config.fp8_wgrad

    def graph_capture_blockers(self) -> list[str]:
        """Why a step with these experts cannot be captured."""
        if self.config.moe_pad_expert_input_to_capacity:
            return []
        return [
            "cuda_graph_impl='full_iteration' with moe_grouped_gemm=False: experts in sequence need their counts on "
            "the host; add --moe-grouped-gemm."
        ]

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        host_tokens_per_expert: list[int] | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Run every row through its expert: rows [R, h], tokens_per_expert int [n], probs [R] -> [R, h].

        Rows behind the last expert's are not read, and come out as zeros. With ETP the result is a summand; the
        dispatcher adds those of the other ranks. An expert without rows runs on an empty
        tensor, so that its weights receive gradients of zeros.
        Host: one wait for the counts on a GPU, unless they are given on the host.
        """
        counts = tokens_per_expert.tolist() if host_tokens_per_expert is None else host_tokens_per_expert
        tail = len(permuted_probs) - sum(counts)
        *rows, unread = permuted_local_hidden_states.split([*counts, tail])
        pieces = zip(self.local_experts, rows, permuted_probs.split([*counts, tail])[:-1], strict=True)
        outputs = [self._run(expert, rows, probs) for expert, rows, probs in pieces]
        return torch.cat([*outputs, torch.zeros_like(unread)] if tail else outputs), None

    def _run(self, expert: torch.nn.Module, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """One expert: rows [r, h], probs [r] -> [r, h]."""
        inner_probs: torch.Tensor | None = probs
        if self.config.moe_apply_probs_on_input:
            rows, inner_probs = (rows * probs.unsqueeze(-1)).to(rows.dtype), None
        inner, bias = expert.linear_fc1(rows)  # type: ignore[operator]
        if bias is not None:
            inner = inner + bias
        inner, uses = activate_experts(self.config, inner, inner_probs)
        with uses:
            output, bias = expert.linear_fc2(inner)  # type: ignore[operator]
        return output if bias is None else add_weighted_bias(output, bias, inner_probs)
