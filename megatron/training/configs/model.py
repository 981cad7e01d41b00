"""What the model is built from beside TransformerConfig: positions, vocabulary, implementation."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation


@dataclasses.dataclass(kw_only=True)
class ModelConfig(ConfigTopic):
    """Model assembly."""

    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Set of layer implementations; auto takes local. transformer_engine needs that library and a GPU."""

    seq_length: int | None = None
    """Tokens of one training sample."""

    max_position_embeddings: int | None = None
    """Longest position; at least the sequence length."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""

    rotary_base: int = 10000
    """Base frequency of RoPE."""

    rotary_percent: float = 1.0
    """Fraction of a head's dimension that is rotated."""

    rotary_seq_len_interpolation_factor: int | None = None
    """Linear interpolation of positions."""

    use_rope_scaling: bool = False
    """Scale frequencies as Llama 3 does."""

    rope_scaling_factor: float = 8.0
    """Factor of that scaling."""

    group_query_attention: bool = False
    """Several query heads share a key and value head; the number is --num-query-groups."""

    swiglu: bool = False
    """MLP with a SiLU gate."""

    squared_relu: bool = False
    """MLP with the square of ReLU as activation."""

    untie_embeddings_and_output_weights: bool = False
    """The output layer has a matrix of its own."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the TP size."""

    padded_vocab_size: int | None = None
    """Explicit size of the padded vocabulary."""

    fp16_lm_cross_entropy: bool = False
    """Compute the cross entropy in fp16."""

    def check(self) -> list[Violation]:
        """Positions cover the sequence; one activation."""
        found = []
        if self.seq_length is None or self.seq_length < 1:
            found.append(violation(self, "seq_length", "a sample has a length", "set --seq-length"))
        elif self.max_position_embeddings is not None and self.max_position_embeddings < self.seq_length:
            remedy = "raise --max-position-embeddings or lower --seq-length"
            names = "max_position_embeddings seq_length"
            found.append(violation(self, names, "every token needs a position", remedy))
        elif self.max_position_embeddings is None and self.position_embedding_type == "learned_absolute":
            names = "max_position_embeddings position_embedding_type"
            remedy = "set --max-position-embeddings, or use --position-embedding-type rope"
            found.append(violation(self, names, "a learned position table has a size", remedy))
        if self.swiglu and self.squared_relu:
            remedy = "drop --swiglu or --squared-relu"
            found.append(violation(self, "swiglu squared_relu", "an MLP has one activation", remedy))
        if self.make_vocab_size_divisible_by < 1:
            remedy = "set --make-vocab-size-divisible-by to 1 or more"
            found.append(violation(self, "make_vocab_size_divisible_by", "a divisor is positive", remedy))
        return found + self._check_rotary()

    def _check_rotary(self) -> list[Violation]:
        found = []
        if not 0.0 < self.rotary_percent <= 1.0:
            remedy = "set --rotary-percent to a fraction from 0 to 1"
            found.append(violation(self, "rotary_percent", "a fraction of the head dimension", remedy))
        for name in ("rotary_base", "rotary_seq_len_interpolation_factor", "rope_scaling_factor"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                remedy = f"set --{name.replace('_', '-')} to a number above 0"
                found.append(violation(self, name, "frequencies and positions are divided by it", remedy))
        return found
