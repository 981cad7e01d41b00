"""One microbatch in one model chunk, cut into pieces that a schedule runs one at a time.

begin            embedding, or the hidden states that another pipeline stage sent
layers[i]        the stages of each layer
end              what follows the layers: at the end of the model final norm, output layer and loss
begin_backward   the same way back: `end`, the layers in reverse, `begin`
finish_weight_grads   those of the first layer, if the schedule left them until the gradient of the input was sent
"""

from collections.abc import Callable

import torch

from megatron.core import streams
from megatron.core.deferred_wgrad import WgradQueue
from megatron.core.pipeline_parallel.overlap.layer_plan import LayerPlan, PlanSettings
from megatron.core.pipeline_parallel.overlap.nodes import Handed, StageNode, hand_over
from megatron.core.pipeline_parallel.overlap.protocol import ModelStages
from megatron.core.streams import Role


class ChunkPlan:
    """The pieces of one forward and its backward.

    Args:
        stages: The call of the chunk, cut up.
        finish: Maps the chunk's output to what it hands on: the loss [] at the end of the model, else the output.
        name: Names chunk and microbatch in reports.
        settings: What all plans of a step share.
        leaves_wgrads: Leave the delayed weight gradients of the first layer, which backward comes to last, to
            `finish_weight_grads`.
    """

    def __init__(
        self,
        stages: ModelStages,
        finish: Callable[[torch.Tensor], torch.Tensor],
        name: str,
        settings: PlanSettings,
        leaves_wgrads: bool = False,
    ) -> None:
        self.stages, self.name, self.settings, self.leaves_wgrads = stages, name, settings, leaves_wgrads
        self.layers: list[LayerPlan] = []
        self._embed = None
        if stages.embed is not None:
            embed = stages.embed
            self._embed = StageNode(f"{name} embed", Role.COMPUTE, lambda: (embed(),))
        # Its products are not put off: there is no communication behind the last layer for them to cover.
        self._finish = StageNode(f"{name} finish", Role.COMPUTE, lambda hidden: (finish(stages.finish(hidden)),))
        # The shared matrix is complete when `embed` has added its part: until then a queued nothing keeps it silent.
        self._tie = WgradQueue()
        self._value: Handed | None = None

    def begin(self, received: torch.Tensor | None = None) -> None:
        """Start forward from the embedding, or from hidden states [s, b, h] of another pipeline stage."""
        if self._embed is not None:
            (self._value,) = self._embed.forward()
        else:
            assert received is not None, f"{self.name}: a chunk without embedding is given hidden states"
            self._value = hand_over(received)
        assert self._value is not None, f"{self.name}: no hidden states"
        self.layers = [
            LayerPlan(
                layer,
                self.stages.layer_call(self._value.tensor),
                f"{self.name} layer {i}",
                self.settings,
                is_recomputed=i in self.stages.recomputed_layers,
                leaves_wgrads=self.leaves_wgrads and i == 0,
            )
            for i, layer in enumerate(self.stages.layers)
        ]

    def enter_layer(self, index: int) -> LayerPlan:
        """Hand the hidden states, or their gradient, to a layer."""
        layer = self.layers[index]
        assert self._value is not None, f"{self.name}: nothing to give to layer {index}"
        layer.hidden, self._value = self._value, None
        return layer

    def leave_layer(self, index: int) -> None:
        """Take them back after it."""
        self._value = self.layers[index].hidden

    def end(self) -> torch.Tensor:
        """Finish forward; returns the loss [], or what the next pipeline stage is to be sent [s, b, h]."""
        (result,) = self._finish.forward(self._value)
        self._value = None
        assert result is not None, f"{self.name}: no output"
        return result.tensor

    def begin_backward(self, grad: torch.Tensor) -> None:
        """Start backward from the gradient of what `end` returned."""
        if self.stages.tied_weight is not None:
            self._tie.put([self.stages.tied_weight], _nothing)
        (self._value,) = self._finish.backward(hand_over(grad))

    def end_backward(self) -> torch.Tensor | None:
        """Finish backward; returns the gradient [s, b, h] of what the chunk had received, None if it embeds."""
        value, self._value = self._value, None
        self.layers, closed = (self.layers[:1], self.layers[1:]) if self.leaves_wgrads else ([], self.layers)
        for layer in closed:
            layer.close()
        if self._embed is None:
            return None if value is None else value.tensor
        self._embed.backward(value)
        with streams.on(Role.COMPUTE, f"W {self.name} embed"):
            self._tie.flush()
        return None

    def finish_weight_grads(self) -> int:
        """Compute the weight gradients that were left; returns the number of products."""
        layers, self.layers = self.layers, []
        num_products = sum(layer.finish_weight_grads() for layer in layers)
        for layer in layers:
            layer.close()
        return num_products


def _nothing() -> None:
    """Compute nothing."""
