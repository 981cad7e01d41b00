"""The adapters to DeepEP against a stand-in, and their refusals when it is missing or another version."""

import dataclasses
import inspect
import weakref

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import ConfigError, MissingDependencyError
from megatron.core.transformer.moe.dispatchers.hybridep import deep_ep
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup, reset, shared_engine
from tests.common import fake_deep_ep
from tests.common.dispatch_cases import (
    Answers,
    DispatchCase,
    expected_ranks,
    lossless_budget,
    make_inputs,
    new_exchange,
    run_engine,
)

BF16 = {"dtype": torch.bfloat16, "width": 16}
CASES = [
    DispatchCase((3, 65), **BF16),
    DispatchCase((0, 5), num_local_experts=4, num_slots=4, multiple=16, **BF16),
    DispatchCase((7, 6), plan="rank0", **BF16),
]
ENGINES = [("hybridep", "deep_ep"), ("deepep", "auto")]


@pytest.fixture
def library():
    yield fake_deep_ep.install()
    fake_deep_ep.uninstall()
    reset()


def run_job(backend, name, cases):
    fake_deep_ep.install()
    try:
        found = []
        for case in cases:
            setup = EngineSetup(dist.group.WORLD, case.num_local_experts, case.width, case.multiple, num_sms=8)
            found.append(run_engine(shared_engine(backend, name, setup), case, dist.get_rank()))
        return found
    finally:
        fake_deep_ep.uninstall()


def assert_close(got, expected, case):
    """Copies are exact; sums differ by the roundings of bf16 that the library saves or adds."""
    for field in dataclasses.fields(Answers):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if field.name in ("hidden", "grad_hidden"):
            torch.testing.assert_close(a.float(), b.float(), rtol=2.0**-8 * (case.num_ranks + 1), atol=2.0**-7)
        else:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (field.name, a, b)


@pytest.mark.parametrize(("backend", "name"), ENGINES)
def test_adapter_moves_the_same_rows(pool, backend, name):
    results = pool.run(run_job, backend, name, CASES)
    for i, case in enumerate(CASES):
        for rank, expected in enumerate(expected_ranks(case)):
            assert_close(results[rank][i], expected, case)


def test_row_budget_works_and_overflow_is_flagged(pool):
    case = dataclasses.replace(CASES[2], budget=lossless_budget(CASES[2]))
    tight = dataclasses.replace(case, budget=8)
    results = pool.run(run_job, "hybridep", "deep_ep", [case, tight])
    for rank, expected in enumerate(expected_ranks(case)):
        assert_close(results[rank][0], expected, case)
    assert [results[rank][1].dropped > 0 for rank in range(2)] == [True, False]
    assert results[0][1].tokens_per_expert == expected_ranks(tight)[0].tokens_per_expert


def test_no_handle_outlives_its_exchange(library):
    case = DispatchCase((9,), num_local_experts=4, **BF16)
    engine, alive = shared_engine("hybridep", "deep_ep", EngineSetup(None, 4, 16)), []
    for _ in range(100):
        inputs = make_inputs(case, 0)
        exchange = new_exchange(case, inputs)
        rows, _ = engine.dispatch(exchange, inputs.hidden, inputs.probs)
        engine.combine(exchange, rows, None)
        alive.append(weakref.ref(exchange.saved))
        del exchange
        assert not any(ref() for ref in alive)


@pytest.mark.parametrize("class_name", ["HybridEPBuffer", "Buffer"])
def test_the_table_is_what_the_stand_in_takes(library, class_name):
    assert deep_ep.missing_arguments(library, class_name) == []
    for (owner, method), arguments in deep_ep.SIGNATURES.items():
        if owner == class_name:
            assert set(arguments) <= set(inspect.signature(getattr(getattr(library, owner), method)).parameters)


@pytest.mark.parametrize(("backend", "name"), ENGINES)
def test_missing_library_names_the_step_that_installs_it(backend, name):
    remedy = "build DeepEP from source .*, or use --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine auto"
    with pytest.raises(MissingDependencyError, match=remedy):
        shared_engine(backend, name, EngineSetup(None, 4, 16))


def test_other_version_is_refused_by_the_argument_that_it_lacks(library, monkeypatch):
    def dispatch_with_permute(self, *, hidden, routing_map, probs, num_permuted_tokens, pad_multiple, handle):
        raise AssertionError("not called")

    monkeypatch.setattr(library.HybridEPBuffer, "dispatch_with_permute", dispatch_with_permute)
    with pytest.raises(ConfigError, match=r"HybridEPBuffer\.dispatch_with_permute\(non_blocking\)"):
        shared_engine("hybridep", "deep_ep", EngineSetup(None, 4, 16))


@pytest.mark.parametrize(
    ("setup", "text"),
    [(EngineSetup(None, 4, 24), "hidden_size=24: no multiple of 16"), (EngineSetup(None, 3, 16), "3 experts")],
)
def test_sizes_that_would_abort_the_library_are_refused(library, setup, text):
    with pytest.raises(ConfigError, match=text):
        shared_engine("hybridep", "deep_ep", setup)


def test_rows_of_another_dtype_are_refused(library):
    case = DispatchCase((3,), num_local_experts=4, width=16)
    with pytest.raises(ConfigError, match=r"the library moves bf16; add --bf16, or use .*-backend hybridep"):
        run_engine(shared_engine("hybridep", "deep_ep", EngineSetup(None, 4, 16)), case, 0)


@pytest.mark.parametrize("handle", [(1, 2), (*[None] * 11, torch.zeros(1, dtype=torch.int32)), (*[None] * 10, 3)])
def test_handle_of_another_length_has_no_overflow_flag(handle):
    with pytest.raises(ConfigError, match="does not tell where its overflow flag is"):
        deep_ep.overflow_flag(handle)


@pytest.mark.parametrize(("tokens", "padded"), [(1, 64), (3, 64), (63, 64), (64, 64), (65, 128), (4095, 4096)])
def test_tokens_are_rounded_up_to_a_chunk(tokens, padded):
    assert deep_ep.round_up(tokens, deep_ep.CHUNK_TOKENS) == padded
