"""Angles of the rotary embedding.

Channel pair i of d turned channels has the frequency  base^(-2i/d)  and, at position p, the angle  p * frequency.
Two ways to reach longer sequences than trained on:

- linear interpolation divides positions by a factor;
- Llama-3 scaling divides the frequencies of long wavelengths by a factor, leaves short wavelengths alone, and blends
  between: with wavelength w = 2 pi / frequency and trained length L = 8192,

      w < L/4         frequency
      w > L           frequency / factor
      between         (1 - t) * frequency / factor + t * frequency,    t = (L/w - 1) / (4 - 1)

Angles are fp64 whatever the model's dtype: at position 100000 an fp32 angle is off by up to 4e-3.

Legend: s sequence, d turned channels.
"""

import math

import torch
import torch.distributed as dist

from megatron.core.fusions.fused_rope import RotaryTables
from megatron.core.utils.groups import group_rank, group_size
from megatron.core.utils.zigzag import own_chunks

_TRAINED_LENGTH = 8192
_LOW_FREQUENCY_FACTOR = 1.0
_HIGH_FREQUENCY_FACTOR = 4.0


class RotaryEmbedding(torch.nn.Module):
    """Makes the angles for a sequence length and keeps the last tables it made.

    Args:
        kv_channels: Channels of a head.
        rotary_percent: Fraction of them that is turned.
        rotary_interleaved: A pair is channels (2i, 2i + 1) instead of (i, i + d/2).
        seq_len_interpolation_factor: Divisor of the positions.
        rotary_base: Base of the frequencies.
        rope_scaling: Scale frequencies as Llama 3 does.
        rope_scaling_factor: Factor of that scaling.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
    ) -> None:
        super().__init__()
        turned = int(kv_channels * rotary_percent)
        assert turned % 2 == 0, f"kv_channels={kv_channels}, rotary_percent={rotary_percent}: channels turn in pairs"
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.inv_freq = rotary_base ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        if rope_scaling:
            self.inv_freq = scale_frequencies(self.inv_freq, rope_scaling_factor)
        self._kept: tuple[tuple[int, torch.dtype, torch.device], RotaryTables] | None = None

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return the angles of positions offset ... offset + s - 1, fp64 on the CPU [s, 1, 1, d]."""
        positions = torch.arange(max_seq_len, dtype=torch.float64) + offset
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        angles = torch.outer(positions, self.inv_freq)
        if self.rotary_interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]

    def get_tables(
        self, seq_len: int, dtype: torch.dtype, device: torch.device, cp_group: dist.ProcessGroup | None = None
    ) -> RotaryTables:
        """Return cos and sin for this rank's part of positions 0 ... seq_len - 1, each [s, 1, 1, d].

        Without context parallelism that is all of them. Made once per length, dtype and device.
        """
        key = (seq_len, dtype, device)
        if self._kept is None or self._kept[0] != key:
            angles = own_chunks(self(seq_len), 0, group_rank(cp_group), group_size(cp_group))
            tables = RotaryTables.from_angles(angles, dtype)
            self._kept = key, RotaryTables(tables.cos.to(device), tables.sin.to(device))
        return self._kept[1]


def scale_frequencies(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """Return Llama-3 scaled frequencies: fp64 [d/2] -> [d/2]."""
    turns = _TRAINED_LENGTH * frequencies / (2 * math.pi)
    blend = (turns - _LOW_FREQUENCY_FACTOR) / (_HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR)
    share = blend.clamp(0.0, 1.0)
    return (1 - share) * frequencies / factor + share * frequencies
