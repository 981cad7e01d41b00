"""Messages between pipeline stages while a plan runs.

    compute  | F0.0 |  F0.1   |  B0.0   |        SEND posts the output, RECV posts a buffer: neither waits
    comm            | send F0.0 |                a buffer is waited for by the action that reads it (`take`),
                    |  recv B0.0 |               an output lives until its send has finished

A send is waited for when the next one goes the same way, so one output per direction and peer is kept, no more. Shapes
are known on both sides, nothing is negotiated. Without `overlap_p2p_comm` every message is waited for at once.

Both ends list their messages in one common order (plans/transfers.py), so their n-th message on a pair of ranks is the
same one.

Legend: s sequence of this rank, b micro batch, h hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.actions import Action, ActionKind, Direction
from megatron.core.utils.collectives import Message, post_messages, wait_for_messages

Key = tuple[Direction, int, int]
"""(direction, chunk, microbatch): a message from the view of one of its ends."""


@dataclass(frozen=True)
class MessageFormat:
    """What all messages of a step have in common."""

    shape: tuple[int, int, int]
    """[s, b, h]"""
    dtype: torch.dtype
    device: torch.device
    is_overlapped: bool
    is_batched: bool


class Mailbox:
    """Posts messages of one rank and hands out what has arrived."""

    def __init__(self, group: dist.ProcessGroup | None, message_format: MessageFormat | None) -> None:
        """`message_format` None: there are no other stages."""
        self.group = group
        self.format = message_format
        self._arriving: dict[Key, tuple[torch.Tensor, list[dist.Work]]] = {}
        self._leaving: dict[tuple[Direction, int], tuple[torch.Tensor, list[dist.Work]]] = {}

    def post(self, actions: Sequence[Action], fetch: Callable[[Key], torch.Tensor]) -> None:
        """Start the messages `actions`, which follow each other; `fetch` gives what a SEND sends, [s, b, h]."""
        assert self.format is not None, "a plan with messages needs seq_length and micro_batch_size"
        messages = [self._message(action, fetch) for action in actions]
        works = post_messages(messages, self.group, self.format.is_batched)
        # a batch may come back as one handle for all: a list that they share, which the first wait empties
        handles = [[work] for work in works] if len(works) == len(messages) else [works] * len(messages)
        for action, message, handle in zip(actions, messages, handles, strict=True):
            assert action.direction is not None, f"{action} is no message"
            assert action.peer is not None, f"{action} is no message"
            if action.kind is ActionKind.RECV:
                self._arriving[action.direction, action.chunk, action.microbatch] = message.tensor, handle
            else:
                self._leaving[action.direction, action.peer] = message.tensor, handle
        if not self.format.is_overlapped:
            for handle in handles:
                wait_for_messages(handle)

    def _message(self, action: Action, fetch: Callable[[Key], torch.Tensor]) -> Message:
        assert self.format is not None, "a plan with messages needs a message format"
        assert action.direction is not None, f"{action} is no message"
        assert action.peer is not None, f"{action} is no message"
        if action.kind is ActionKind.RECV:
            buffer = torch.empty(self.format.shape, dtype=self.format.dtype, device=self.format.device)
            return Message(buffer, action.peer, is_sent=False)
        self._retire(action.direction, action.peer)
        output = fetch((action.direction, action.chunk, action.microbatch))
        assert (output.shape, output.dtype) == (self.format.shape, self.format.dtype), (
            f"{action}: [s, b, h] is {list(output.shape)} {output.dtype}, the next stage expects "
            f"{list(self.format.shape)} {self.format.dtype}"
        )
        return Message(output.contiguous(), action.peer, is_sent=True)

    def take(self, key: Key) -> torch.Tensor:
        """Wait for a message that was posted, and give it away: [s, b, h]."""
        assert key in self._arriving, f"{key[0].value}{key[1]}.{key[2]} is read before its RECV"
        buffer, handle = self._arriving.pop(key)
        wait_for_messages(handle)
        return buffer

    def _retire(self, direction: Direction, peer: int) -> None:
        """Let go of the last output that went this way."""
        _, handle = self._leaving.pop((direction, peer), (None, []))
        wait_for_messages(handle)

    def close(self) -> None:
        """Wait for the sends that are still under way. Every message has been read."""
        for way in list(self._leaving):
            self._retire(*way)
        unread = [f"{key[0].value}{key[1]}.{key[2]}" for key in self._arriving]
        assert not unread, f"received and never read: {' '.join(unread)}"
