"""Loss scaling: keeps small fp16 gradients above the smallest number that fp16 can hold.

The loss is multiplied by `scale` before backward and the gradients by 1 / scale before the step. A scale that is too
large shows as infinity or NaN; that step is skipped and the scale lowered. The tensors live on one device, so that
multiplying the loss needs no host read.
"""

import torch

from megatron.core.optimizer.optimizer_config import OptimizerConfig


class ConstantGradScaler:
    """A scale that never changes."""

    def __init__(self, scale: float, device: torch.device) -> None:
        """Put `scale` on `device`."""
        self.scale = torch.tensor([scale], dtype=torch.float32, device=device)

    @property
    def inv_scale(self) -> torch.Tensor:
        """1 / scale [1], rounded once from fp64."""
        return self.scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """Take note of one step; nothing to do here."""

    def state_dict(self) -> dict[str, float]:
        """Nothing: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Nothing: the scale comes from the configuration."""


class DynamicGradScaler(ConstantGradScaler):
    """Doubles the scale after `growth_interval` good steps, halves it when overflows persist.

    The first `hysteresis - 1` overflows after the last growth only skip their step; each further one halves the scale,
    down to `min_scale`.
    """

    def __init__(
        self, initial_scale: float, min_scale: float, growth_interval: int, hysteresis: int, device: torch.device
    ) -> None:
        """Start at `initial_scale` with no history."""
        super().__init__(initial_scale, device)
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.num_good_steps = 0
        self.hysteresis_left = hysteresis

    def update(self, found_inf: bool) -> None:
        """Take note of one step."""
        if found_inf:
            self.num_good_steps = 0
            self.hysteresis_left -= 1
            if self.hysteresis_left <= 0:
                self.scale.mul_(0.5).clamp_(min=self.min_scale)
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.num_good_steps = 0
            self.hysteresis_left = self.hysteresis
            self.scale.mul_(2.0)

    def state_dict(self) -> dict[str, float]:
        """Scale and history."""
        return {
            "scale": self.scale.item(),
            "num_good_steps": self.num_good_steps,
            "hysteresis_left": self.hysteresis_left,
        }

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Continue from a saved history."""
        self.scale.fill_(state_dict["scale"])
        self.num_good_steps = int(state_dict["num_good_steps"])
        self.hysteresis_left = int(state_dict["hysteresis_left"])


def build_grad_scaler(config: OptimizerConfig, device: torch.device) -> ConstantGradScaler | None:
    """Constant with a given loss scale, dynamic with fp16, none otherwise."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale, device)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
        device=device,
    )
