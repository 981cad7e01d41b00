"""Running a list of actions: order, gradient synchronisation, misuse."""

from contextlib import contextmanager

import pytest
import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.executor import PlainWorker, execute
from megatron.core.pipeline_parallel.step import StepContext
from megatron.core.process_groups_config import ProcessGroupCollection

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


class Chunk(torch.nn.Module):
    """Writes into `journal` what happens, with a bar for each time `no_sync` is entered."""

    def __init__(self, journal):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.journal = journal
        self.weight.register_hook(lambda grad: journal.append("B"))

    def forward(self, x):
        self.journal.append("F")
        return self.weight * x

    @contextmanager
    def no_sync(self):
        self.journal.append("|")
        yield


def make_context(num_chunks=1, **config_fields):
    journal = []
    return StepContext(
        forward_step_func=lambda iterator, model: (
            model(next(iterator)),
            lambda output: (output, {"loss": output.item()}),
        ),
        data_iterators=[iter([1.0, 2.0, 3.0]) for _ in range(num_chunks)],
        chunks=[Chunk(journal) for _ in range(num_chunks)],
        config=ModelParallelConfig(**config_fields),
        num_microbatches=1,
        pg_collection=ProcessGroupCollection(),
    ), journal


def test_all_but_the_last_microbatch_run_without_synchronisation():
    context, journal = make_context()
    reports = execute([Action(kind, 0, i) for i in range(3) for kind in (F, B)], context)
    assert "".join(journal) == "|F|B|F|BFB"
    assert reports == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]


def test_evaluation_never_asks_for_no_sync():
    context, journal = make_context()
    execute([Action(F, 0, 0), Action(F, 0, 1)], context)
    assert "".join(journal) == "FF"


def test_each_chunk_synchronises_with_the_microbatch_of_its_own_last_backward():
    context, journal = make_context(num_chunks=2)
    plan = [Action(F, 0, 0), Action(F, 1, 0), Action(B, 0, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)]
    execute(plan, context)
    assert "".join(journal) == "F|FBF|BB"


def test_configured_no_sync_replaces_the_chunks_own():
    entered = []

    @contextmanager
    def configured():
        entered.append(True)
        yield

    context, journal = make_context(no_sync_func=configured)
    execute([Action(kind, 0, i) for i in range(2) for kind in (F, B)], context)
    assert "".join(journal) == "FBFB"
    assert len(entered) == 2


class WritingWorker(PlainWorker):
    """A plain worker whose weight gradients come with their W."""

    def weight_grads(self, action):
        self.context.chunks[action.chunk].journal.append("W")


def test_weight_gradients_synchronise_with_their_microbatch():
    context, journal = make_context()
    plan = [Action(kind, 0, i) for i in range(2) for kind in (F, B, ActionKind.WGRAD)]
    execute(plan, context, WritingWorker(context))
    assert "".join(journal) == "|F|B|WFBW"


def test_whole_chunks_put_no_weight_gradient_off():
    with pytest.raises(AssertionError, match=r"W0.0: weight gradients that come later need chunks in stages"):
        execute([Action(F, 0, 0), Action(B, 0, 0), Action(ActionKind.WGRAD, 0, 0)], make_context()[0])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([Action(B, 0, 0)], "B0.0 comes before its forward"),
        ([Action(F, 0, 0), Action(F, 0, 0), Action(B, 0, 0)], "F0.0 runs twice"),
        ([Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 1)], r"forward without backward .* \[\(0, 0\)\]"),
    ],
)
def test_impossible_plans_are_refused(plan, message):
    with pytest.raises(AssertionError, match=message):
        execute(plan, make_context()[0])
