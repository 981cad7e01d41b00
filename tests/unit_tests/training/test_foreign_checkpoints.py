"""Checkpoints that Megatron-LM wrote in its torch_dist format: weights load, everything else is refused by name.

The folder is built with torch.distributed.checkpoint as that program fills it: stacked layers, norms stored with the
projection that follows them, experts on an axis of their own, byte items for FP8 state, generators and arguments, and
`common.pt` beside them.
"""

import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.common.forked_run import run_ranks

LAYERS, HIDDEN, EXPERTS, FFN, VOCAB = 2, 32, 4, 48, 128
SHAPES = {
    "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 3 * HIDDEN, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    "decoder.layers.pre_mlp_layernorm.weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.router.weight": (LAYERS, EXPERTS, HIDDEN),
    "decoder.layers.mlp.router.expert_bias": (LAYERS, EXPERTS),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (LAYERS, EXPERTS, 2 * FFN, HIDDEN),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (LAYERS, EXPERTS, HIDDEN, FFN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (VOCAB, HIDDEN),
}
MODEL = (
    f"--device cpu --transformer-impl local --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 2 "
    f"--seq-length 16 --max-position-embeddings 16 --position-embedding-type rope --normalization RMSNorm --swiglu "
    f"--disable-bias-linear --ffn-hidden-size {FFN} --num-experts {EXPERTS} --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --untie-embeddings-and-output-weights --vocab-size 100 --mock-data "
    "--tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 --micro-batch-size 2 --train-iters 1 --lr 0 "
    "--log-interval 1 --log-state-hash --no-load-optim"
).split()


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {key: torch.randn(shape, generator=generator) * 0.02 for key, shape in SHAPES.items()}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The root folder of a run of the other program, at iteration 5."""
    state = {
        **weights(),
        "optimizer.state.exp_avg.output_layer.weight": torch.zeros(VOCAB, HIDDEN),
        "chained_1.optimizer.state.exp_avg.decoder.layers.mlp.router.weight": torch.zeros(LAYERS, EXPERTS, HIDDEN),
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2": io.BytesIO(b"fp8"),
        "rng_state/shard_0.0_1.1": io.BytesIO(b"generators"),
        "rerun_state_machine_state/shard_0_1": io.BytesIO(b"machine"),
    }
    folder = tmp_path / "iter_0000005"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 5}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    return tmp_path


def outcome(argv: Sequence[str], status: int) -> str:
    (rank,) = run_ranks(1, argv)
    assert rank.status == status, rank.output[-3000:]
    assert "Traceback" not in rank.output
    return rank.output


def test_weights_load_and_train_on(foreign: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    output = outcome([*MODEL, "--load", str(foreign), "--finetune", "--save", str(own)], 0)
    assert f"loaded checkpoint {foreign}/iter_0000005 at iteration 0" in output
    saved = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(saved, checkpoint_id=own / "iter_0000001", no_dist=True)
    bias = "decoder.layers.mlp.router.expert_bias"  # moves with every step, even at learning rate zero
    assert all(torch.equal(saved[key], data) for key, data in weights().items() if key != bias)
    assert torch.allclose(saved[bias], weights()[bias], atol=1.1e-3)


def test_resume_of_another_program_is_refused_by_name(foreign: Path) -> None:
    assert "common.pt: arguments, scheduler and counters of another program" in outcome(
        [*MODEL, "--load", str(foreign)], 1
    )


def test_missing_weight_is_refused_by_name(foreign: Path) -> None:
    output = outcome([*MODEL, "--qk-layernorm", "--load", str(foreign), "--finetune"], 1)
    assert "not in the checkpoint (2):\n    decoder.layers.self_attention.k_layernorm.weight" in output
