"""The shape of the decoder: sizes, norms, activations, dropout, initialisation.

Whatever is left open is derived: `ffn_hidden_size` from the width, `kv_channels` from width and heads,
`num_query_groups` from the heads.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import NO_FLAG, knob


@dataclasses.dataclass(kw_only=True)
class ArchitectureConfig(ConfigTopic):
    """Architecture of the decoder."""

    num_layers: int = knob(0, arg_default=None)
    """Transformer layers of the whole model."""

    hidden_size: int = knob(0, arg_default=None)
    """Width h of the model."""

    num_attention_heads: int = knob(0, arg_default=None)
    """Query heads."""

    ffn_hidden_size: int = knob(None)
    """Width of a dense layer's MLP; unset: 4h, or 8h/3 rounded down to a multiple of 64 for a gated MLP."""

    kv_channels: int = knob(None)
    """Dimension of one head; unset: h divided by the number of heads."""

    num_query_groups: int = knob(None, arg_default=1)
    """Key and value heads; read only with --group-query-attention, else one per query head."""

    activation_func: Callable[[torch.Tensor], torch.Tensor] = knob(F.gelu, flag=NO_FLAG)
    """Activation of the MLPs: gelu, silu or squared_relu; set by --swiglu and --squared-relu."""

    gated_linear_unit: bool = knob(False, flag=NO_FLAG)
    """The MLP multiplies act(gate) by up; set by --swiglu."""

    add_bias_linear: bool = knob(True, flag="--disable-bias-linear")
    """Linear layers have a bias; the flag removes it."""

    add_qkv_bias: bool = False
    """Only the QKV projection has a bias."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm."""

    layernorm_epsilon: float = knob(1e-5, flag="--norm-epsilon")
    """Added to the variance before the square root."""

    layernorm_zero_centered_gamma: bool = knob(False, flag="--apply-layernorm-1p")
    """Store the norm's weight minus one, so that zero means identity."""

    qk_layernorm: bool = False
    """Normalise queries and keys per head."""

    rotary_interleaved: bool = False
    """Rotate even and odd pairs of a head instead of its halves."""

    apply_rope_fusion: bool = knob(True, flag="--no-rope-fusion")
    """On a GPU the rotary embedding, with the norms of heads before it, is one kernel that rounds once."""

    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Attention kernel: flash, fused (cuDNN), plain matrix products (unfused, local), or torch's choice (auto)."""

    apply_query_key_layer_scaling: bool = False
    """Divide attention scores by the layer number and multiply it back inside an fp32 softmax, for fp16 runs."""

    attention_softmax_in_fp32: bool = False
    """Softmax of the plain attention in fp32; flash and fused kernels do so anyway."""

    bias_activation_fusion: bool = knob(False, flag="--no-bias-gelu-fusion", dest="bias_gelu_fusion", arg_default=True)
    """GELU after a bias uses the tanh form of Megatron's fused kernel; the flag asks for the exact form."""

    bias_swiglu_fusion: bool = knob(True, flag="--no-bias-swiglu-fusion")
    """On a GPU SwiGLU, of the experts with their probabilities, is one kernel that rounds once."""

    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""

    hidden_dropout: float = 0.1
    """Dropout on residual branches and embeddings."""

    init_method_std: float = 0.02
    """Standard deviation of the normal initialisation; output projections divide it by sqrt(2 * num_layers)."""

    init_method: Callable[[torch.Tensor], object] | None = knob(None, flag=NO_FLAG)
    """In-place initialiser of a matrix that reads the residual stream; unset: normal with init_method_std."""

    output_layer_init_method: Callable[[torch.Tensor], object] | None = knob(None, flag=NO_FLAG)
    """In-place initialiser of a matrix that writes to the residual stream; unset: as init_method_std says."""

    def derive(self) -> None:
        """Fill the open sizes; impossible divisions are left to check()."""
        if self.ffn_hidden_size is None:
            gated = int(self.hidden_size * 8 / 3) // 64 * 64
            width = gated if self.gated_linear_unit else 4 * self.hidden_size
            rule = "8/3 of hidden_size, rounded down to 64" if self.gated_linear_unit else "4 * hidden_size"
            self.fill("ffn_hidden_size", width, rule)
        if self.num_attention_heads > 0:
            head = self.hidden_size // self.num_attention_heads
            self.fill("kv_channels", head, "hidden_size / num_attention_heads")
        self.fill("num_query_groups", self.num_attention_heads, "num_attention_heads")
        if self.add_bias_linear and not self.add_qkv_bias:
            self.replace("add_qkv_bias", True, "add_bias_linear")

    def check(self) -> list[Violation]:
        """The sizes are there and divide each other."""
        found = [
            violation(self, name, "the model needs it", f"set --{name.replace('_', '-')} to a positive number")
            for name in ("num_layers", "hidden_size", "num_attention_heads")
            if not getattr(self, name) or getattr(self, name) < 1
        ]
        found.extend(self._check_heads() if not found else [])
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                remedy = f"set --{name.replace('_', '-')} to a value from 0 up to 1"
                found.append(violation(self, name, "a probability below 1", remedy))
        if self.ffn_hidden_size < 1 and self.hidden_size > 0:
            remedy = "set --ffn-hidden-size to a positive number"
            found.append(violation(self, "ffn_hidden_size hidden_size", "an MLP has a width", remedy))
        for name, flag in (("layernorm_epsilon", "--norm-epsilon"), ("init_method_std", "--init-method-std")):
            if not getattr(self, name) >= 0.0:
                found.append(violation(self, name, "not negative", f"set {flag} to 0 or more"))
        return found

    def _check_heads(self) -> list[Violation]:
        found = []
        derived = self.origins.get("kv_channels")
        if not derived and self.kv_channels < 1:
            found.append(violation(self, "kv_channels", "a head has channels", "set --kv-channels to 1 or more"))
        if derived and self.hidden_size % self.num_attention_heads:
            found.append(
                violation(
                    self,
                    "hidden_size num_attention_heads",
                    "the width must be a multiple of the number of heads",
                    "change one of them, or give the head dimension with --kv-channels",
                )
            )
        if self.num_query_groups < 1 or self.num_attention_heads % self.num_query_groups:
            found.append(
                violation(
                    self,
                    "num_query_groups num_attention_heads",
                    "every query group serves the same number of heads",
                    "set --num-query-groups to a divisor of --num-attention-heads",
                )
            )
        return found
