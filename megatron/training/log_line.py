"""The text of a training log line, as Megatron users and their scripts know it.

Pure formatting. Unlike Megatron-LM a loss is printed whatever it is: nan and negative values stay visible.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class LogValues:
    """What one line says. None or zero leaves an optional piece out where the field says so."""

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms_per_iteration: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    loss_scale: float
    num_skipped_iterations: int
    num_nan_iterations: int
    skipped_samples: int = 0
    """Left out when 0."""
    tflops_per_gpu: float | None = None
    moe_metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the routers that are no losses."""
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    tokens_per_second: float | None = None
    hidden_share: float | None = None
    """Share of expert communication under compute; left out where nothing was measured."""
    num_overflows: int | None = None
    """Steps repeated for want of rows since the last line; None without a row budget."""
    row_head_room: float | None = None
    """Share of the row budget that the fullest rank has left free, below 0 after an overflow."""
    state_hash: str | None = None


def format_log_line(values: LogValues, now: datetime) -> str:
    """Return the line; pieces in Megatron's order, each ended by ` |`, ours at the end."""
    v = values
    pieces = [
        f" iteration {v.iteration:8d}/{v.train_iters:8d}",
        f" consumed samples: {v.consumed_samples:12d}",
    ]
    if v.skipped_samples:
        pieces.append(f" skipped samples: {v.skipped_samples:12d}")
    pieces.append(f" elapsed time per iteration (ms): {v.elapsed_ms_per_iteration:.1f}")
    if v.tflops_per_gpu is not None:
        pieces.append(f" throughput per GPU (TFLOP/s/GPU): {v.tflops_per_gpu:.1f}")
    pieces.append(f" learning rate: {v.learning_rate:.6E}")
    pieces.append(f" global batch size: {v.global_batch_size:5d}")
    pieces += [f" {key}: {loss:.6E}" for key, loss in v.losses.items()]
    pieces += [f" {key}: {value:.2f}" for key, value in v.moe_metrics.items()]
    pieces.append(f" loss scale: {v.loss_scale:.1f}")
    if v.grad_norm is not None:
        pieces.append(f" grad norm: {v.grad_norm:.3f}")
    if v.num_zeros is not None:
        pieces.append(f" num zeros: {int(v.num_zeros)}")
    if v.params_norm is not None:
        pieces.append(f" params norm: {v.params_norm:.3f}")
    pieces.append(f" number of skipped iterations: {v.num_skipped_iterations:3d}")
    pieces.append(f" number of nan iterations: {v.num_nan_iterations:3d}")
    if v.tokens_per_second is not None:
        pieces.append(f" tokens per second: {v.tokens_per_second:.0f}")
    if v.hidden_share is not None:
        pieces.append(f" hidden communication: {v.hidden_share:.3f}")
    if v.num_overflows is not None:
        pieces.append(f" row overflows: {v.num_overflows}")
    if v.row_head_room is not None:
        pieces.append(f" row head room (%): {100.0 * v.row_head_room:.1f}")
    if v.state_hash is not None:
        pieces.append(f" state hash: {v.state_hash}")
    return f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}]" + "".join(f"{piece} |" for piece in pieces)
