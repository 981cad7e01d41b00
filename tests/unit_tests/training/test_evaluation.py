"""Evaluation: one value whatever the batches, the ranks and the masks are."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import evaluation, global_vars
from megatron.training.callbacks.base import CallbackList
from megatron.training.evaluation import evaluate, evaluate_and_print, format_evaluation, perplexity
from megatron.training.train_state import TrainState

NUM_SAMPLES, LENGTH = 16, 4


class Scores(torch.nn.Module):
    """A model whose token loss is a table; `training` adds one, as dropout would change it."""

    def __init__(self):
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)

    def forward(self, samples):
        return TABLE[samples] + self.training


GENERATOR = torch.Generator().manual_seed(3)
TABLE = torch.rand(NUM_SAMPLES, LENGTH, generator=GENERATOR, dtype=torch.float64)
MASK = (torch.rand(NUM_SAMPLES, LENGTH, generator=GENERATOR) < 0.3).double() * torch.arange(NUM_SAMPLES)[:, None].gt(4)
EXPECTED = float((TABLE * MASK).sum() / MASK.sum())


def forward_step(data_iterator, model):
    samples = next(data_iterator)
    mask = MASK[samples]

    def loss_func(losses):
        loss_sum, count = (losses * mask).sum(), mask.sum()
        return loss_sum, count.long(), {"lm loss": torch.stack([loss_sum, count])}

    return model(samples), loss_func


def build_run(micro_batch_size, global_batch_size, groups):
    args = argparse.Namespace(
        eval_global_batch_size=global_batch_size,
        eval_micro_batch_size=micro_batch_size,
        eval_iters=NUM_SAMPLES // global_batch_size,
        seq_length=LENGTH,
        log_validation_ppl_to_tensorboard=True,
        full_validation=False,
    )
    return SimpleNamespace(
        args=args,
        model=[Scores()],
        forward_step_func=forward_step,
        pg_collection=groups,
        valid_iterator=None,
        callbacks=CallbackList([]),
        counters={"evaluations": 0},
        guarded_steps=None,
        state=TrainState(iteration=20, consumed_train_samples=160),
    )


def batches(micro_batch_size, rank=0, size=1):
    """The micro batches of one rank, in the order of the `single` sampler."""
    samples = torch.arange(NUM_SAMPLES).split(micro_batch_size)
    return iter(samples[rank::size])


@pytest.mark.parametrize(("micro", "batch"), [(1, 4), (4, 4), (2, 8), (16, 16)])
def test_value_does_not_depend_on_accumulation(micro, batch):
    run = build_run(micro, batch, ProcessGroupCollection())
    losses = evaluate(run, batches(micro), run.args.eval_iters)
    assert losses == {"lm loss": pytest.approx(EXPECTED, rel=1e-12)}
    assert run.model[0].training


def evaluate_on_rank():
    parallel_state.initialize_model_parallel()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    run = build_run(2, 8, groups)
    return evaluate(run, batches(2, groups.dp.rank(), 2), run.args.eval_iters)["lm loss"]


def test_value_does_not_depend_on_the_number_of_ranks(pool):
    assert pool.run(evaluate_on_rank, world_size=2) == [pytest.approx(EXPECTED, rel=1e-12)] * 2


def test_block_equals_the_known_example():
    text = " validation loss at iteration 20 | lm loss value: 7.214003E+00 | lm loss PPL: 1.358319E+03 | "
    rule = "-" * (len(text) + 1)
    assert format_evaluation({"lm loss": 7.214003}, "iteration 20") == f"{rule}\n{text}\n{rule}"


@pytest.mark.parametrize(("loss", "value"), [(0.0, 1.0), (20.0, 485165195.4097903), (30.0, 485165195.4097903)])
def test_perplexity_is_cut_at_an_exponent_of_twenty(loss, value):
    assert perplexity(loss) == pytest.approx(value)


def test_several_sets_are_reported_by_index_and_counted_once(capsys, monkeypatch):
    written = {}
    monkeypatch.setattr(evaluation, "write_scalars", lambda scalars, *at: written.update(dict.fromkeys(scalars, at)))
    run = build_run(4, 8, ProcessGroupCollection())
    run.valid_iterator = [batches(4), batches(4)]
    evaluate_and_print(run, run.valid_iterator, "iteration 20")
    out = capsys.readouterr().out
    assert " validation-0 loss at iteration 20 | lm loss value: " in out
    assert " validation-1 loss at iteration 20 | lm loss value: " in out
    assert run.state.consumed_valid_samples == NUM_SAMPLES
    keys = [f"lm loss validation-{i}{kind}" for i in (0, 1) for kind in ("", " ppl")]
    assert written == dict.fromkeys(keys, (20, 160))
    assert global_vars.get_tensorboard_writer() is None
