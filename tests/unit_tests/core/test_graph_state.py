"""The list of living graphs, and the mark of a capture."""

import gc

import pytest

from megatron.core import graph_state


class Graph:
    def __init__(self):
        self.is_alive = True

    def destroy(self):
        self.is_alive = False


@pytest.fixture(autouse=True)
def _forget():
    yield
    graph_state.reset()


def test_all_living_graphs_are_destroyed():
    graphs = [Graph(), Graph()]
    for graph in graphs:
        graph_state.register(graph)
    graph_state.destroy_graphs()
    assert [graph.is_alive for graph in graphs] == [False, False]
    assert graph_state.num_graphs() == 0


def test_list_keeps_no_graph_alive():
    graph_state.register(Graph())
    gc.collect()
    assert graph_state.num_graphs() == 0


def test_collector_rests_during_a_capture_and_comes_back_after_an_error():
    seen = []
    with pytest.raises(ZeroDivisionError), graph_state.capturing():
        seen.append((graph_state.is_capturing(), gc.isenabled(), 1 // 0))
    with graph_state.capturing():
        seen.append((graph_state.is_capturing(), gc.isenabled()))
    assert seen == [(True, False)]
    assert gc.isenabled()
    assert not graph_state.is_capturing()
