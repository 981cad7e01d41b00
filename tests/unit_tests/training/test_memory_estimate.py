"""The memory estimate against the bytes of the real model."""

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import core_transformer_config_from_args, parse_args
from megatron.training.memory_estimate import optimizer_bytes, parameter_bytes, rank_parameters

BASE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
    "--device cpu "
)
MOE = "--num-experts 8 --moe-layer-freq ([0]*1+[1]*2) --disable-bias-linear --moe-token-dispatcher-type alltoall "
VARIANTS = {
    "dense": "",
    "dense-modern": "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --qk-layernorm",
    "qkv-bias": "--disable-bias-linear --add-qkv-bias --bf16",
    "moe": MOE + "--swiglu --moe-ffn-hidden-size 24",
    "moe-grouped": MOE + "--swiglu --moe-ffn-hidden-size 24 --moe-grouped-gemm --bf16",
    "moe-shared": MOE + "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --qk-layernorm",
}


class FakeGroup:
    """Stands in for a process group where only its size and the rank in it are asked for."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size

    def rank(self):
        return self._size - 1


def build(flags, ep_size, monkeypatch, tp_size=1, etp_size=1):
    monkeypatch.setenv("WORLD_SIZE", str(ep_size * tp_size * etp_size))
    flags += f" --tensor-model-parallel-size {tp_size} --sequence-parallel --expert-model-parallel-size {ep_size}"
    if "--num-experts" in flags:
        flags += f" --expert-tensor-parallel-size {etp_size}"
    args = parse_args(f"{BASE} {flags}".split())
    args.padded_vocab_size = 128
    config = core_transformer_config_from_args(args)
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config),
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=ProcessGroupCollection(
            tp=FakeGroup(tp_size),
            ep=FakeGroup(ep_size),
            expt_tp=FakeGroup(etp_size),
            tp_ep=FakeGroup(ep_size * etp_size),
        ),
    )
    return args, model


@pytest.mark.parametrize(("variant", "etp_size"), [("dense", 1), ("dense-modern", 1), ("moe", 2), ("moe-shared", 1)])
def test_estimate_equals_the_model_split_over_tp(variant, etp_size, monkeypatch):
    args, model = build(VARIANTS[variant], 2 if "moe" in variant else 1, monkeypatch, tp_size=2, etp_size=etp_size)
    assert parameter_bytes(args) == sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize(
    ("variant", "ep_size"),
    [(name, ep) for name in VARIANTS for ep in ((1, 2, 4) if name.startswith("moe") else (1,))],
)
def test_estimate_equals_the_model_to_the_byte(variant, ep_size, monkeypatch):
    args, model = build(VARIANTS[variant], ep_size, monkeypatch)
    parameters = list(model.parameters())
    assert parameter_bytes(args) == sum(p.numel() * p.element_size() for p in parameters)
    expert = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and "shared" not in name)
    assert rank_parameters(args).expert == expert
    assert {p.dtype for p in parameters} == {torch.bfloat16 if args.bf16 else torch.float32}


def test_sharded_optimizer_takes_a_rank_its_share(monkeypatch):
    """EP 2 of 4 ranks: dense states are cut in 4, those of experts in 2; two fp32 moments are 8 bytes."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = f"{VARIANTS['moe']} --expert-model-parallel-size 2 --use-distributed-optimizer"
    args = parse_args(f"{BASE} {flags}".split())
    args.padded_vocab_size = 128
    count = rank_parameters(args)
    assert optimizer_bytes(args) == 8 * (count.dense // 4 + count.expert // 2)


@pytest.mark.parametrize(
    "more", ["", "--untie-embeddings-and-output-weights", "--num-virtual-stages-per-pipeline-rank 2"]
)
def test_stages_together_have_the_whole_model_and_a_tied_matrix_twice(monkeypatch, more):
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = f"{BASE} {MOE} --num-layers 4 --moe-layer-freq 2 --global-batch-size 4"
    whole = parse_args(flags.split() + [word for word in more.split() if "untie" in word])
    staged = parse_args(f"{flags} {more} --pipeline-model-parallel-size 2".split())
    whole.padded_vocab_size = staged.padded_vocab_size = 128
    parts = [rank_parameters(staged, rank) for rank in range(2)]
    expected = rank_parameters(whole)
    again = 0 if "untie" in more else 128 * 32
    assert sum(part.dense for part in parts) == expected.dense + again
    assert sum(part.expert for part in parts) == expected.expert
