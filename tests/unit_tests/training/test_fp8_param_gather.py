"""--fp8-param-gather: the run without it, bit for bit, with about half the bytes of the gather."""

from contextlib import nullcontext

import pytest

from megatron.core.errors import ConfigError
from megatron.core.optimizer import fp8_param_gather
from megatron.core.optimizer.fp8_param_gather import CodeGather
from megatron.core.utils import collectives
from megatron.core.utils.groups import group_rank
from megatron.training.arguments import parse_args
from megatron.training.callbacks.base import Callback
from megatron.training.state_hash import state_hash
from tests.common.mutants import replaced
from tests.common.stream_runs import TINY_MOE, train

STEPS = (
    "--expert-model-parallel-size 1 --train-iters 4 --global-batch-size 4 --use-distributed-optimizer "
    "--eval-interval 2 --eval-iters 1 --hidden-size 32 --moe-ffn-hidden-size 160 "
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 4 "
CODED = "--fp8-param-gather "


class Figures(Callback):
    """Losses and gradient norm after each step; the state after the last one, and the bytes gathered in it."""

    def __init__(self):
        self.steps, self.hash, self.bytes, self._counted = [], None, 0, 0

    def all_gather(self, output, tensor, **options):
        self._counted += output.nbytes
        return self._original(output, tensor, **options)

    def on_step_start(self, run):
        self._counted = 0

    def on_step_end(self, run, result):
        self.steps.append((result.losses, result.grad_norm))
        self.bytes = self._counted
        if run.state.iteration == run.args.train_iters:
            self.hash = state_hash(run.model, run.optimizer)


def run_job(flags, fault=None):
    """Body of a rank: losses and norms of all steps, the last state, bytes gathered in the last step."""
    figures = Figures()
    figures._original = collectives._all_gather
    mutant = nullcontext() if fault is None else replaced(CodeGather, *fault)
    with replaced(collectives, "_all_gather", figures.all_gather), mutant:
        train([*TINY_MOE, *STEPS.split(), *flags.split()], [figures])
    return figures.steps, figures.hash, figures.bytes


def compare(pool, flags, world_size=2, fault=None):
    """Whether the run is the same with codes; the ratio of the bytes gathered."""
    plain = pool.run(run_job, flags, world_size=world_size)
    coded = pool.run(run_job, flags + CODED, fault, world_size=world_size)
    assert len(plain[0][0]) == 4
    return [one[:2] for one in plain] == [one[:2] for one in coded], coded[0][2] / plain[0][2]


def finish_without_values(gather, finish=CodeGather.finish):
    """The weights are lost but for the own shard, which the optimizer has."""
    finish(gather)
    own = gather._parts[group_rank(gather._group)]
    for number in gather._grids:
        flat = gather._params[number].detach().view(-1)
        kept = {part.number: slice(part.begin, part.end) for part in own}.get(number, slice(0, 0))
        values = flat[kept].clone()
        flat.fill_(float("nan"))
        flat[kept] = values


def agree_with_nobody(gather, own, values, agree=CodeGather._agree):
    """Each rank takes the amaxes of its own parts."""
    with replaced(fp8_param_gather, "all_reduce", lambda *args: None):
        return agree(gather, own, values)


RECIPES = {
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max ",
    "tensorwise": "--fp8-format e4m3 --fp8-recipe tensorwise ",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise ",
}
SHARES = {"blockwise": (0.95, 1.0)}
"""Of the bytes, where experts, most of this model, stay in bf16."""


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("overlap", ["", OVERLAP], ids=["at_once", "overlap"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_as_codes_change_no_bit_and_halve_the_bytes(pool, recipe, overlap, world_size):
    is_same, ratio = compare(pool, RECIPES[recipe] + overlap, world_size)
    assert is_same
    low, high = SHARES.get(recipe, (0.5, 0.55))
    assert low < ratio <= high


@pytest.mark.full
def test_layers_read_codes_alone(pool):
    is_same, _ = compare(pool, RECIPES["delayed"] + OVERLAP, fault=("finish", finish_without_values))
    assert is_same


@pytest.mark.full
def test_codes_by_amaxes_of_one_rank_are_seen(pool):
    is_same, _ = compare(pool, RECIPES["tensorwise"], fault=("_agree", agree_with_nobody))
    assert not is_same


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--first-last-layers-bf16 --num-layers-at-end-in-bf16 0 ",
        "--expert-model-parallel-size 2 ",
        "--pipeline-model-parallel-size 2 --num-layers 4 --moe-layer-freq [0,1,1,1] ",
        "--tensor-model-parallel-size 2 --sequence-parallel ",
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --expert-model-parallel-size 2 ",
    ],
)
def test_layouts_change_no_bit(pool, flags):
    assert compare(pool, RECIPES["delayed"] + OVERLAP + flags, world_size=4)[0]


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_run_goes_on_from_a_checkpoint_with_and_without_codes(pool, recipe, tmp_path):
    flags = RECIPES[recipe] + OVERLAP
    expected = pool.run(run_job, f"{flags}--save {tmp_path}/plain --save-interval 2", world_size=2)
    coded = pool.run(run_job, f"{flags}--save {tmp_path}/coded --save-interval 2 {CODED}", world_size=2)
    assert coded[0][:2] == expected[0][:2]
    for folder, option in (("coded", CODED), ("plain", CODED), ("coded", "")):
        again = pool.run(run_job, f"{flags}--load {tmp_path}/{folder} --ckpt-step 2 {option}", world_size=2)
        assert again[0][:2] == (expected[0][0][2:], expected[0][1])


@pytest.mark.full
def test_weights_loaded_without_optimizer_state_are_quantised_anew(pool, tmp_path):
    flags = RECIPES["delayed"] + OVERLAP
    pool.run(run_job, f"{flags}--save {tmp_path} --save-interval 2", world_size=2)
    plain, coded = (
        pool.run(run_job, f"{flags}--load {tmp_path} --finetune {option}", world_size=2) for option in ("", CODED)
    )
    assert coded[0][:2] == plain[0][:2]


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("", "fp8_param_gather=True with fp8=None"),
        ("--fp8-format e4m3 --fp8-recipe rowwise", "fp8_param_gather=True with fp8_recipe='rowwise'"),
        ("--fp8-format e4m3 --moe-expert-rank-capacity-factor 2.0", "fp8_param_gather=True with cuda_graph_impl"),
    ],
)
def test_runs_that_cannot_have_it_are_refused(flags, fields):
    line = [*TINY_MOE, "--use-distributed-optimizer", "--fp8-param-gather", *flags.split()]
    with pytest.raises(ConfigError) as error:
        parse_args(line)
    assert fields in str(error.value)
    assert "drop --fp8-param-gather" in str(error.value)
