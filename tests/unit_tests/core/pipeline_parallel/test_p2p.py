"""Messages between two ranks: what is kept for how long, and what is refused."""

import weakref

import pytest
import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.actions import Action, ActionKind, Direction
from megatron.core.pipeline_parallel.p2p import Mailbox, MessageFormat

FORWARD = Direction.ACTIVATION


def make_mailbox(is_overlapped=True, is_batched=False, shape=(2, 1, 3)):
    device = torch.device("cpu")
    return Mailbox(dist.group.WORLD, MessageFormat(shape, torch.float64, device, is_overlapped, is_batched))


def send(microbatch):
    return Action(ActionKind.SEND, 0, microbatch, FORWARD, peer=1)


def recv(microbatch):
    return Action(ActionKind.RECV, 0, microbatch, FORWARD, peer=0)


def number(value):
    return torch.full((2, 1, 3), float(value), dtype=torch.float64)


def outputs_alive_after_each_send():
    """Rank 0 sends three outputs that nobody else holds; rank 1 reads them late."""
    mailbox = make_mailbox()
    if dist.get_rank() == 1:
        mailbox.post([recv(i) for i in range(3)], lambda key: number(-1))
        values = [mailbox.take((FORWARD, 0, i))[0, 0, 0].item() for i in range(3)]
        mailbox.close()
        return values
    alive, seen = [], []
    for i in range(3):
        outputs = {(FORWARD, 0, i): number(i)}
        seen.append(weakref.ref(outputs[FORWARD, 0, i].untyped_storage()))
        mailbox.post([send(i)], outputs.pop)
        alive.append([reference() is not None for reference in seen])
    mailbox.close()
    return alive, [reference() is not None for reference in seen]


def test_an_output_lives_until_its_send_has_finished_and_no_longer(pool):
    (alive, at_end), values = pool.run(outputs_alive_after_each_send, world_size=2)
    assert values == [0.0, 1.0, 2.0]
    assert alive == [[True], [False, True], [False, False, True]]
    assert at_end == [False, False, False]


class HandleOfNothing:
    """Stands in for the handle of a backend that does not keep the tensor; notes when it is waited for."""

    def __init__(self, number, storage, journal):
        self.number, self.storage, self.journal = number, storage, journal

    def wait(self):
        assert self.storage() is not None, f"output {self.number} was freed before its send had finished"
        self.journal.append(f"waited {self.number}")


def journal_of_three_sends(monkeypatch, is_overlapped):
    """What happens to outputs that only the mailbox holds."""
    journal = []

    def isend(tensor, group, group_dst):
        name = int(tensor[0, 0, 0])
        storage = tensor.untyped_storage()
        weakref.finalize(storage, journal.append, f"freed {name}")
        journal.append(f"sent {name}")
        return HandleOfNothing(name, weakref.ref(storage), journal)

    monkeypatch.setattr(dist, "isend", isend)
    form = MessageFormat((2, 1, 3), torch.float64, torch.device("cpu"), is_overlapped, is_batched=False)
    mailbox = Mailbox(None, form)
    for i in range(3):
        mailbox.post([send(i)], lambda key: number(key[2]))
        journal.append(f"computed {i}")
    mailbox.close()
    return journal


def test_the_mailbox_itself_keeps_an_output_until_its_send_was_waited_for(monkeypatch):
    """Handles of NCCL keep no tensor, those of gloo do and would hide it."""
    journal = journal_of_three_sends(monkeypatch, is_overlapped=True)
    assert journal == [f"{event} {i}" for i in range(3) for event in ("sent", "computed", "waited", "freed")]


def test_without_overlap_a_send_is_waited_for_at_once(monkeypatch):
    journal = journal_of_three_sends(monkeypatch, is_overlapped=False)
    assert [event for event in journal if "freed" not in event] == [
        event for i in range(3) for event in (f"sent {i}", f"waited {i}", f"computed {i}")
    ]


def exchange(is_overlapped, is_batched):
    """Both ranks send and receive in one go."""
    mailbox, rank = make_mailbox(is_overlapped, is_batched), dist.get_rank()
    actions = [
        Action(ActionKind.SEND, 0, 4, FORWARD, peer=1 - rank),
        Action(ActionKind.RECV, 0, 4, FORWARD, peer=1 - rank),
    ]
    mailbox.post(actions, lambda key: number(10 + rank))
    got = mailbox.take((FORWARD, 0, 4))[0, 0, 0].item()
    mailbox.close()
    return got


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_messages_cross_in_every_way_to_post_them(pool, is_overlapped, is_batched):
    assert pool.run(exchange, is_overlapped, is_batched, world_size=2) == [11.0, 10.0]


def test_what_was_not_posted_cannot_be_read():
    with pytest.raises(AssertionError, match=r"F0\.7 is read before its RECV"):
        Mailbox(None, None).take((FORWARD, 0, 7))


def test_an_output_of_another_size_is_named():
    form = MessageFormat((2, 1, 3), torch.float64, torch.device("cpu"), True, False)
    with pytest.raises(AssertionError, match=r"send\(F0.0,1\): \[s, b, h\] is \[2, 1, 4\]"):
        Mailbox(None, form).post([send(0)], lambda key: torch.zeros(2, 1, 4, dtype=torch.float64))
