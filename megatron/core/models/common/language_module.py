"""What language models share: the loss over the vocabulary, and the matrix that embedding and output may share.

Legend: s sequence, b batch, v rows of the vocabulary (padding included).
"""

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.module import MegatronModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


class LanguageModule(MegatronModule):
    """Base of language models.

    Args:
        true_vocab_size: Rows of the vocabulary that are tokens; the rows after them are filler, left out of the loss.
        fp16_lm_cross_entropy: Compute the loss in the dtype of the logits instead of fp32.
    """

    def __init__(
        self,
        config: TransformerConfig,
        true_vocab_size: int,
        fp16_lm_cross_entropy: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        self.true_vocab_size = true_vocab_size
        self.fp16_lm_cross_entropy = fp16_lm_cross_entropy

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, fp32 at least: int64 [b, s], [s, b, v] -> [b, s]."""
        losses = vocab_parallel_cross_entropy(
            logits,
            labels.transpose(0, 1).contiguous(),
            tp_group=self.pg_collection.tp,
            true_vocab_size=self.true_vocab_size,
            dtype=logits.dtype if self.fp16_lm_cross_entropy else None,
            fuses=self.config.cross_entropy_loss_fusion,
        )
        return losses.transpose(0, 1).contiguous()
