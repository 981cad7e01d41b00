"""Sizes that do not divide end the program on any one rank: at once, before it looks for the others (T76)."""

import logging
import sys
import time

import pytest
import torch.distributed as dist

import pretrain_gpt
from megatron.core import parallel_state

BASE = (
    "--device cpu --transformer-impl local --num-layers 2 --hidden-size 48 --num-attention-heads 6 --seq-length 24 "
    "--max-position-embeddings 24 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --mock-data --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 32 --train-iters 2 --swiglu --disable-bias-linear "
)
GPU = "--device cuda"
"""What is refused there, whether or not this machine has one."""
GROUPS = "--group-query-attention --num-query-groups 2 "
MOE = "--num-experts 8 --moe-ffn-hidden-size 16 "
TP = "--tensor-model-parallel-size"
CP = "--context-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
SP = "--sequence-parallel"
PP = "--pipeline-model-parallel-size"
VPP = "--num-virtual-stages-per-pipeline-rank"
REFUSED = {
    "world_dense": (6, f"{TP} 2 {CP} 2", "world_size=6 with tensor_model_parallel_size=2", "TP * PP * CP"),
    "world_expert": (6, f"{MOE} {EP} 4", "world_size=6 with expert_tensor_parallel_size=1", f"change {EP}"),
    "heads": (4, f"{TP} 4", "num_attention_heads=6 with tensor_model_parallel_size=4", f"a multiple of {TP}"),
    "groups": (3, f"{GROUPS} {TP} 3", "num_query_groups=2 with tensor_model_parallel_size=3", f"a multiple of {TP}"),
    "ffn": (2, f"{TP} 2 --ffn-hidden-size 15", "ffn_hidden_size=15 with tensor_model_parallel_size=2", TP),
    "shared_expert": (
        2,
        f"{MOE} {TP} 2 {SP} --moe-shared-expert-intermediate-size 5",
        "moe_shared_expert_intermediate_size=5 with tensor_model_parallel_size=2",
        "--moe-shared-expert-intermediate-size a multiple",
    ),
    "expert_ffn": (3, f"{MOE} {ETP} 3", "moe_ffn_hidden_size=16 with expert_tensor_parallel_size=3", f"of {ETP}"),
    "experts": (3, f"{MOE} {EP} 3", "num_moe_experts=8 with expert_model_parallel_size=3", f"a multiple of {EP}"),
    "sequence_sp": (2, f"{TP} 2 {SP} --seq-length 23", "seq_length=23 with tensor_model_parallel_size=2", TP),
    "sequence_cp": (2, f"{CP} 2 --seq-length 22", "seq_length=22 with context_parallel_size=2", "multiple of 2 * CP"),
    "sequence_sp_cp": (
        12,
        f"{TP} 6 {CP} 2 {SP} --seq-length 20",
        "seq_length=20 with tensor_model_parallel_size=6, context_parallel_size=2, sequence_parallel=True",
        f"drop {SP}",
    ),
    "heads_cp": (
        4,
        f"{CP} 4 --cp-comm-type a2a",
        "cp_comm_type='a2a' with num_attention_heads=6",
        "--cp-comm-type p2p",
    ),
    "cudnn_cp": (
        2,
        f"{GPU} --bf16 {CP} 2 --attention-backend fused",
        "attention_backend='fused' with context_parallel_size=2: blocks of keys go through the flash kernel",
        "--cp-comm-type a2a",
    ),
    "odd_heads_cp": (
        2,
        f"{GPU} --bf16 {CP} 2 --kv-channels 12",
        "kv_channels=12 with context_parallel_size=2: the flash kernel needs a multiple of 8",
        "--attention-backend unfused",
    ),
    "cudnn_repeats": (
        1,
        f"{GPU} --bf16 --attention-backend fused --deterministic-mode",
        "attention_backend='fused' with deterministic_mode=True",
        "--attention-backend flash",
    ),
    "flash_fp32": (
        1,
        f"{GPU} --attention-backend flash",
        "attention_backend='flash' with params_dtype=torch.float32: the kernel is for bf16 and fp16",
        "add --bf16",
    ),
    "world_pp": (
        3,
        f"{PP} 2",
        "world_size=3 with tensor_model_parallel_size=1, pipeline_model_parallel_size=2",
        "TP * PP",
    ),
    "stages": (4, f"{PP} 4", "num_layers=2 with pipeline_model_parallel_size=4", f"set --num-layers 4, or {PP} 2"),
    "uneven_stages": (
        4,
        f"{PP} 4 --num-layers 6",
        "6 layers do not divide into 4 equal stages",
        "set --num-layers 4 or 8, or --pipeline-model-parallel-layout 'Ett|tt|t|tL'",
    ),
    "chunks": (
        2,
        f"{PP} 2 {VPP} 2 --global-batch-size 4 --num-layers 6",
        "num_layers=6 with pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2",
        f"set --num-layers 4 or 8, or --pipeline-model-parallel-layout 'Ett|tt|t|tL' instead of {VPP}",
    ),
    "layers_of_a_chunk": (
        2,
        f"{PP} 2 --num-layers-per-virtual-pipeline-stage 3 --global-batch-size 4 --num-layers 4",
        "4 layers cannot be dealt out in chunks of 3",
        "set --num-layers 6, or --pipeline-model-parallel-layout 'Ett|ttL'",
    ),
    "chunks_of_one_stage": (
        1,
        f"{VPP} 2",
        "virtual_pipeline_model_parallel_size=2 with pipeline_model_parallel_size=1",
        f"raise {PP}",
    ),
    "last_group": (
        2,
        f"{PP} 2 {VPP} 2 --num-layers 4 --global-batch-size 6",
        "the last group has 1 microbatches",
        "use 2 or 4 microbatches",
    ),
    "layout": (
        2,
        f"{PP} 2 --pipeline-model-parallel-layout Et|t|tL --num-layers 3",
        "it has 3 stages, no multiple of the 2 ranks",
        "use for instance 'Ett|tL'",
    ),
    "first_stage": (
        3,
        f"{PP} 3 --decoder-first-pipeline-num-layers 3 --num-layers 6",
        "num_layers_in_first_pipeline_stage=3 with num_layers=6",
        "use --pipeline-model-parallel-layout 'Ett|tt|ttL'",
    ),
    "batch_dp": (2, "--global-batch-size 6", "global_batch_size=6", "--global-batch-size"),
}


@pytest.fixture(autouse=True)
def _leave_nothing_behind():
    yield
    logging.getLogger("megatron").handlers.clear()


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_divide_are_refused_on_one_rank_within_a_second(case, monkeypatch, capsys):
    world_size, flags, subject, remedy = REFUSED[case]
    # The other ranks do not exist: a program that waited for them would never end.
    for name, value in {"RANK": world_size - 1, "LOCAL_RANK": 0, "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *f"{BASE} {flags}".split()])
    start = time.process_time()
    code = pretrain_gpt.main()
    seconds = time.process_time() - start
    text = capsys.readouterr().err
    assert code != 0
    assert "ConfigError" in text
    assert any(subject in line and "; " in line and remedy in line for line in text.splitlines()), text
    assert "Traceback" not in text
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert seconds < 1.0
