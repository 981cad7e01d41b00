"""Public launch lines, pasted: they parse, or exactly the named features that are not there are refused."""

import shlex

import pytest

from megatron.core.errors import ConfigError
from megatron.training.arguments import core_transformer_config_from_args, parse_args

MIXTRAL = """
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
--tokenizer-model tokenizer.model --data-path my_mixtral_text_document --split 99990,8,2 --micro-batch-size 1
--global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5
--weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 --expert-model-parallel-size 8 --log-interval 1
--eval-interval 1000 --eval-iters 10 --tensorboard-dir tb --moe-permute-fusion --moe-router-dtype fp32
--distributed-backend nccl --transformer-impl transformer_engine
"""
MIXTRAL_MEGATRON = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
--save ckpt --load ckpt --save-interval 10000 --no-load-optim --no-load-rng --overlap-param-gather
"""
QWEN3 = """
--use-mcore-models --transformer-impl transformer_engine --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
--num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
--seq-length 4096 --max-position-embeddings 40960 --position-embedding-type rope --use-rotary-position-embeddings
--rotary-base 1000000 --rotary-percent 1.0 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1187 --init-method-std 0.02
--attention-dropout 0.0 --hidden-dropout 0.0 --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-fusion --attention-backend flash
--cross-entropy-loss-fusion --cross-entropy-fusion-impl native --no-gradient-accumulation-fusion
--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --context-parallel-size 1
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 256
--train-samples 268554688 --lr-warmup-samples 1024000 --lr-decay-samples 255126953 --lr 1.2e-4 --min-lr 1.2e-5
--lr-decay-style cosine --lr-warmup-init 1.2e-6 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
--bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 151936 --manual-gc --manual-gc-interval 5
--eval-iters 0 --log-throughput --log-interval 1 --logging-level 40 --distributed-timeout-minutes 60
--no-create-attention-mask-in-dataloader --num-workers 6 --moe-router-force-load-balancing --overlap-grad-reduce
"""
DEEPSEEK = """
--use-mcore-models --transformer-impl transformer_engine --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
--num-attention-heads 128 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096
--position-embedding-type rope --rotary-base 10000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --qk-layernorm --multi-latent-attention --q-lora-rank 1536
--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0
--mscale-all-dim 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --num-experts 256
--moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
--moe-router-topk 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 1e-3 --moe-router-num-groups 8 --moe-router-group-topk 4
--moe-router-topk-scaling-factor 2.5 --moe-router-pre-softmax --moe-router-dtype fp32
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --expert-model-parallel-size 64
--recompute-granularity selective --recompute-modules mla_up_proj moe --micro-batch-size 1 --global-batch-size 8192
--train-iters 1000 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine --bf16 --mock-data
--tokenizer-type NullTokenizer --vocab-size 129280 --fp8-format e4m3 --fp8-recipe blockwise
"""


def parse(line, monkeypatch, world):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    return parse_args([*shlex.split(line.replace("([0]*3+[1]*58)", "'([0]*3+[1]*58)'")), "--device", "cpu"])


def refused_features(line, monkeypatch, world):
    with pytest.raises(ConfigError) as caught:
        parse(line, monkeypatch, world)
    return str(caught.value).split("\n")


def test_mixtral_line_parses(monkeypatch):
    args = parse(MIXTRAL, monkeypatch, 8)
    config = core_transformer_config_from_args(args)
    assert (config.num_moe_experts, config.moe_router_topk, config.num_query_groups) == (8, 2, 8)
    assert (config.ffn_hidden_size, config.moe_ffn_hidden_size, config.gated_linear_unit) == (14336, 14336, True)
    assert (args.position_embedding_type, args.rotary_base, args.data_parallel_size) == ("rope", 1000000, 8)


def test_mixtral_line_with_everything_parses(monkeypatch):
    args = parse(MIXTRAL + MIXTRAL_MEGATRON, monkeypatch, 64)
    assert (args.pipeline_model_parallel_size, args.data_parallel_size, args.num_layers) == (4, 8, 32)


def test_qwen3_line_parses(monkeypatch):
    args = parse(QWEN3, monkeypatch, 8)
    config = core_transformer_config_from_args(args)
    assert (config.kv_channels, config.num_query_groups, config.moe_ffn_hidden_size) == (128, 4, 768)
    assert (config.layernorm_epsilon, config.qk_layernorm, args.lr_decay_samples) == (1e-6, True, 255126953)


def test_deepseek_line_is_refused_for_named_features_only(monkeypatch):
    lines = refused_features(DEEPSEEK, monkeypatch, 64)
    assert all("not there yet" in line for line in lines), lines
    names = ("multi-latent attention", "YaRN", "multi-token prediction", "recompute of a part")
    assert all(any(name in line for line in lines) for name in names)


def test_deepseek_line_without_these_parses(monkeypatch):
    kept = (
        DEEPSEEK.split("--multi-latent-attention")[0] + "--attention-dropout" + DEEPSEEK.split("--attention-dropout")[1]
    )
    kept = kept.split("--mtp-num-layers")[0] + (
        "--expert-model-parallel-size 64 --micro-batch-size 1 --global-batch-size 8192 --train-iters 9 --lr 1e-3 "
        "--bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 129280"
    )
    config = core_transformer_config_from_args(parse(kept, monkeypatch, 64))
    assert config.moe_layer_freq == [0] * 3 + [1] * 58
    assert (config.moe_router_num_groups, config.moe_router_group_topk) == (8, 4)
