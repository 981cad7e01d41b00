"""Vector clocks: order comes from events, through any number of streams, and from nothing else."""

from megatron.core.stream_check.clocks import Clocks, Operation


def issue(clocks, stream):
    return Operation(stream, clocks.advance(stream), "op", "")


def test_operations_of_one_stream_are_ordered():
    clocks = Clocks()
    assert clocks.is_ordered(issue(clocks, "a"), "a")


def test_operations_of_two_streams_are_not():
    clocks = Clocks()
    assert not clocks.is_ordered(issue(clocks, "a"), "b")


def test_event_orders_what_came_before_it_and_nothing_after():
    clocks = Clocks()
    before = issue(clocks, "a")
    event = clocks.snapshot("a")
    after = issue(clocks, "a")
    clocks.join("b", event)
    assert clocks.is_ordered(before, "b")
    assert not clocks.is_ordered(after, "b")


def test_order_is_handed_on_through_a_third_stream():
    clocks = Clocks()
    first = issue(clocks, "a")
    clocks.join("b", clocks.snapshot("a"))
    clocks.join("c", clocks.snapshot("b"))
    assert clocks.is_ordered(first, "c")


def test_older_event_takes_nothing_back():
    clocks = Clocks()
    old = clocks.snapshot("a")
    first = issue(clocks, "a")
    clocks.join("b", clocks.snapshot("a"))
    clocks.join("b", old)
    assert clocks.is_ordered(first, "b")


def test_stream_is_behind_another_once_it_has_waited_for_all_of_it():
    clocks = Clocks()
    issue(clocks, "a")
    assert not clocks.is_behind("b", "a")
    clocks.join("b", clocks.snapshot("a"))
    assert clocks.is_behind("b", "a")
