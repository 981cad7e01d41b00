"""Which engine moves the rows: what auto takes and says, and the refusals with what to do instead."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.transformer.moe.dispatchers.hybridep import symm_mem
from megatron.core.transformer.moe.dispatchers.hybridep.collective import CollectiveEngine
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup, reset, shared_engine

SETUP = EngineSetup(None, 2, 16)
AUTO_REMEDY = "choose another engine, or --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine auto."


@pytest.fixture(autouse=True)
def no_shared_engines():
    reset()
    yield
    reset()


@pytest.fixture
def two_gpus(monkeypatch):
    """Ranks 0 and 1 with a GPU each; returns what decides whether they reach each other."""
    facts = {"local_world_size": 2, "peer": True}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: facts["peer"])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(symm_mem.env, "local_world_size", lambda: facts["local_world_size"])
    return facts


def refusal(backend, name, setup=SETUP):
    with pytest.raises(ConfigError) as caught:
        shared_engine(backend, name, setup)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_auto_without_a_gpu_takes_collectives_and_says_why(caplog):
    caplog.set_level("INFO")
    assert isinstance(shared_engine("hybridep", "auto", SETUP), CollectiveEngine)
    reason = "(not symm_mem, rank 0 of the expert ranks: there is no GPU)"
    assert f"moe_hybridep_engine: auto takes collective {reason}" in caplog.messages


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_symmetric_memory_without_a_gpu_is_refused():
    subject = "moe_hybridep_engine='symm_mem' with moe_flex_dispatcher_backend='hybridep': symm_mem, "
    assert refusal("hybridep", "symm_mem") == f"{subject}rank 0 of the expert ranks: there is no GPU; {AUTO_REMEDY}"


def test_unknown_names_list_the_known_ones():
    known = "choose one of auto, symm_mem, collective, deep_ep."
    assert refusal("hybridep", "nvshmem") == f"moe_hybridep_engine='nvshmem': not an engine of this backend; {known}"
    text = refusal("auto", "auto")
    assert text == "moe_flex_dispatcher_backend='auto': not a backend of this tree; choose one of hybridep, deepep."


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"peer": False}, "GPU 0 has no peer access to GPU [1]"),
        ({"local_world_size": 1}, "the expert ranks [0, 1] are on several hosts with 1 processes each"),
        ({"local_world_size": None}, None),
    ],
    ids=str,
)
def test_gpus_that_do_not_reach_each_other_are_named(two_gpus, facts, reason):
    pytest.importorskip("triton")
    two_gpus.update(facts)
    setup = EngineSetup(object(), 2, 16)  # type: ignore[arg-type]
    assert symm_mem.SymmMemEngine.why_unavailable(setup) == reason


def test_without_triton_the_reason_is_triton(two_gpus, monkeypatch):
    monkeypatch.setattr(symm_mem, "is_available", lambda name: False)
    assert symm_mem.SymmMemEngine.why_unavailable(SETUP) == "Triton is not installed"
