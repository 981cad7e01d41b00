"""Which dtype the model computes in."""

import dataclasses

import torch

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import NO_FLAG, knob


@dataclasses.dataclass(kw_only=True)
class PrecisionConfig(ConfigTopic):
    """Precision of the model."""

    bf16: bool = False
    """Compute in bfloat16 with fp32 main weights and gradients."""

    fp16: bool = False
    """Compute in float16 with loss scaling, fp32 main weights and gradients."""

    params_dtype: torch.dtype = knob(None, flag=NO_FLAG)
    """Dtype of the parameters; unset: follows bf16 and fp16, else float32. float64 is for tests."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""

    def derive(self) -> None:
        """The parameter dtype follows the switches."""
        half = torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32
        source = "bf16" if self.bf16 else "fp16" if self.fp16 else "neither bf16 nor fp16"
        self.fill("params_dtype", half, source)

    def check(self) -> list[Violation]:
        """At most one half precision, and the dtype agrees with it."""
        found = []
        if self.bf16 and self.fp16:
            found.append(
                violation(self, "bf16 fp16", "a run has one compute precision", "give either --bf16 or --fp16")
            )
        elif self.bf16 and self.params_dtype != torch.bfloat16:
            found.append(
                violation(self, "bf16 params_dtype", "bf16 means bfloat16 parameters", "leave params_dtype out")
            )
        elif self.fp16 and self.params_dtype != torch.float16:
            found.append(
                violation(self, "fp16 params_dtype", "fp16 means float16 parameters", "leave params_dtype out")
            )
        if self.fp32_residual_connection and not (self.bf16 or self.fp16):
            found.append(
                violation(
                    self,
                    "fp32_residual_connection bf16 fp16",
                    "the residual stream has the model's precision already",
                    "add --bf16 or --fp16, or drop --fp32-residual-connection",
                )
            )
        return found
