"""The GPT decoder and the specs of its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

__all__ = ["GPTModel"]


def __getattr__(name: str) -> Any:
    """Import the model on first use (PEP 562), so that the specs alone stay cheap."""
    if name != "GPTModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel
