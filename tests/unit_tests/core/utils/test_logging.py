import logging

import pytest

from megatron.core.utils import logging as ours


@pytest.fixture
def rank(monkeypatch):
    """Be one rank of a world of four."""

    def become(number):
        monkeypatch.setattr(ours, "get_rank", lambda: number)
        monkeypatch.setattr(ours, "get_world_size", lambda: 4)

    return become


def test_without_a_process_group_this_process_is_rank_zero_of_one():
    assert (ours.get_rank(), ours.get_world_size()) == (0, 1)


@pytest.mark.parametrize(("number", "asked", "speaks"), [(0, 0, True), (1, 0, False), (3, -1, True), (0, -1, False)])
def test_one_rank_speaks(rank, capsys, caplog, number, asked, speaks):
    rank(number)
    ours.emit("line", asked)
    with caplog.at_level(logging.INFO):
        ours.log_single_rank(logging.getLogger("t"), logging.INFO, "record", asked)
    assert capsys.readouterr().out == ("line\n" if speaks else "")
    assert caplog.messages == (["record"] if speaks else [])


def test_every_rank_speaks_when_asked(rank, capsys):
    rank(2)
    ours.emit("line", rank=None)
    assert capsys.readouterr().out == "line\n"


def test_rank_and_level_stand_in_front(rank):
    record = logging.LogRecord("megatron.a", logging.WARNING, "a.py", 1, "text", None, None)
    assert ours._RankFormatter("%(message)s").format(record) == "WARNING: text"
    rank(3)
    assert ours._RankFormatter("%(message)s").format(record) == "[rank 3] WARNING: text"


def test_setup_twice_leaves_one_handler():
    root = logging.getLogger(ours.ROOT_NAME)
    before = (list(root.handlers), root.level, root.propagate)
    root.handlers.clear()
    try:
        ours.setup_logging()
        ours.setup_logging()
        assert len(root.handlers) == 1
    finally:
        root.handlers[:], root.level, root.propagate = before
