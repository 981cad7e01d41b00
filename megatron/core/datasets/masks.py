"""Loss mask, positions and attention mask of one sample, from its input tokens.

All three are ruled by the *input*: with `eod_mask_loss` an EOD token does not have to predict the first token of the
next document; a reset takes effect after the EOD, which still belongs to its document. True in an attention mask =
masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class MaskOptions:
    """Which borders count."""

    reset_position_ids: bool
    """Positions begin again after an EOD."""
    reset_attention_mask: bool
    """Tokens do not attend across an EOD."""
    eod_mask_loss: bool
    """No loss where the input is EOD."""
    create_attention_mask: bool
    """Ship the [1, s, s] mask."""

    @property
    def depends_on_tokens(self) -> bool:
        """Whether masks differ between samples."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


def segment_starts(tokens: torch.Tensor, eod_token: int) -> torch.Tensor:
    """Return where documents begin in tokens [s]: place 0 and each place after an EOD, as int64 [n]."""
    after_eod = torch.nonzero(tokens == eod_token).flatten() + 1
    return torch.cat((torch.zeros(1, dtype=torch.int64), after_eod))


def positions_from_starts(starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return positions int64 [length] that begin at zero at each of the increasing starts [n]."""
    lengths = torch.diff(starts, append=torch.tensor([length]))
    return torch.arange(length) - torch.repeat_interleave(starts, lengths)


def get_ltor_masks_and_position_ids(
    tokens: torch.Tensor, eod_token: int, options: MaskOptions
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return attention mask bool [1, s, s] or None, loss mask fp32 [s] and positions int64 [s] for tokens [s]."""
    length = tokens.numel()
    loss_mask = torch.ones(length, dtype=torch.float32)
    if options.eod_mask_loss:
        loss_mask[tokens == eod_token] = 0.0
    position_ids = torch.arange(length)
    needs_starts = options.reset_position_ids or (options.reset_attention_mask and options.create_attention_mask)
    starts = segment_starts(tokens, eod_token) if needs_starts else None
    if options.reset_position_ids and starts is not None:
        position_ids = positions_from_starts(starts, length)
    attention_mask = None
    if options.create_attention_mask:
        attention_mask = torch.ones((length, length), dtype=torch.bool).triu_(1)
        if options.reset_attention_mask and starts is not None:
            for start in starts[1:].tolist():
                attention_mask[start:, :start] = True
        attention_mask = attention_mask.unsqueeze(0)
    return attention_mask, loss_mask, position_ids


def cu_seqlens_of_parts(part_lengths: list[int], sequence_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the borders of document parts, int32 [s + 1] filled up with s, and the longest part, int32 []."""
    borders = np.full(sequence_length + 1, sequence_length, dtype=np.int32)
    borders[0] = 0
    borders[1 : len(part_lengths) + 1] = np.cumsum(part_lengths)
    return torch.from_numpy(borders), torch.tensor(max(part_lengths), dtype=torch.int32)
