"""Every call that orders streams or keeps memory is needed: without it a run is reported.

Each call is left out in turn, in the first of the configurations that makes it and then in the others. A call that no
configuration misses is redundant, and stands in SURVIVORS with the reason.
"""

import pytest
import torch

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.nodes import StageNode, hand_over
from megatron.core.stream_check.recorder import StreamRecorder
from megatron.core.streams import Role
from tests.common.call_sites import deleted, find_call_sites
from tests.common.stream_runs import TINY_MOE, calls_made, run_without
from tests.unit_tests.core.stream_check.cases import CHUNKS, DELAYED, HYBRIDEP, ONE_EXPERT, PIPELINE, ZERO

CONFIGURATIONS = {
    "delayed": (DELAYED, 2, ""),
    "ZeRO": ((*DELAYED, *ONE_EXPERT, *ZERO), 2, ""),
    "pipeline": ((*TINY_MOE, *PIPELINE, *CHUNKS), 2, ""),
    "counts on the device": ((*DELAYED, *HYBRIDEP), 2, "experts_that_read_counts"),
}
SURVIVORS: dict[str, str] = {}
"""{call: why nothing misses it}"""
MIN_REPORTED = 0.95


def findings_of_a_pair_of_nodes():
    """A value of compute that comm takes over from outside of any node."""
    node = StageNode("0.0 layer 0 dispatch", Role.COMM, lambda rows: (rows * 2,))
    with StreamRecorder() as recorder, streams.step(torch.device("cpu")):
        node.forward(hand_over(torch.ones(2, 2) * 3))
    streams.reset()
    return recorder.findings


def is_missed(pool, site, made):
    """True if one of the configurations that make the call is reported without it."""
    for name, (flags, size, double) in CONFIGURATIONS.items():
        if site in made[name] and run_without(pool, flags, site, size, double):
            return True
    with deleted(site):
        return bool(findings_of_a_pair_of_nodes())


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_call_is_missed(pool):
    sites = find_call_sites()
    made = {name: calls_made(pool, *run) for name, run in CONFIGURATIONS.items()}
    silent = {str(site) for site in sites if not is_missed(pool, site, made)}
    assert silent == set(SURVIVORS), f"of {len(sites)} calls these are not missed: {sorted(silent)}"
    assert len(silent) <= (1 - MIN_REPORTED) * len(sites), f"{len(silent)} of {len(sites)} calls are not missed"


def site_named(text):
    (site,) = [site for site in find_call_sites() if str(site) == text]
    return site


def test_missing_wait_of_a_node_is_reported(pool):
    report = run_without(pool, DELAYED, site_named("pipeline_parallel/overlap/nodes.py::_wait_for::wait[0]"))
    assert "  compute has not waited for comm" in report
    assert "  comm has not waited for compute" in report


def test_missing_hold_of_a_node_is_reported(pool):
    report = run_without(pool, DELAYED, site_named("pipeline_parallel/overlap/nodes.py::_let_go::hold[0]"))
    assert "before its last use: tensor bfloat16" in report


def test_missing_event_of_a_value_from_outside_is_reported():
    assert findings_of_a_pair_of_nodes() == []
    with deleted(site_named("pipeline_parallel/overlap/nodes.py::hand_over::record[0]")):
        (finding,) = findings_of_a_pair_of_nodes()
    assert finding.then.stage == "F 0.0 layer 0 dispatch"
