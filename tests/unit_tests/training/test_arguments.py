"""Command lines and their answers: values, derived values, and every kind of broken input."""

import shlex
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megatron.core.configs.flag_spec import flag_specs
from megatron.core.configs.moe import MoEConfig
from megatron.core.errors import ConfigError
from megatron.core.transformer.moe.dispatchers.hybridep.engine import BACKENDS, ENGINES
from megatron.core.transformer.moe.token_dispatcher import DISPATCHERS
from megatron.core.utils.activations import squared_relu
from megatron.training import arguments
from megatron.training.argument_factory import build_parser

TINY = (
    "--num-layers 4 --hidden-size 96 --num-attention-heads 6 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type ByteTokenizer --device cpu"
)
MOE = TINY + " --num-experts 8 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def parse(line):
    return arguments.parse_args(shlex.split(line))


def problems(line):
    with pytest.raises(ConfigError) as caught:
        parse(line)
    return str(caught.value).split("\n")


def test_derived_values_are_filled_in():
    args = parse(MOE + " --swiglu --bf16")
    assert (args.ffn_hidden_size, args.moe_ffn_hidden_size, args.kv_channels, args.num_query_groups) == (
        256,
        256,
        16,
        6,
    )
    assert (args.global_batch_size, args.eval_global_batch_size, args.lr_decay_iters) == (2, 2, 5)
    assert (args.data_parallel_size, args.params_dtype, args.dataloader_type) == (1, torch.bfloat16, "single")
    assert args.accumulate_allreduce_grads_in_fp32 is True


def test_values_remember_their_origin():
    origins = parse(MOE).origins
    assert origins["num_experts"] == "command line (--num-experts)"
    assert origins["kv_channels"] == "derived from hidden_size / num_attention_heads"
    assert origins["clip_grad"] == "default"


def test_expert_tensor_size_follows_tp_and_says_so():
    assert parse(MOE).origins["expert_tensor_parallel_size"] == "derived from tensor_model_parallel_size"


def test_negative_switches_turn_off_what_is_on():
    args = parse(TINY + " --disable-bias-linear --no-mmap-bin-files --no-check-for-nan-in-loss-and-grad")
    assert (args.add_bias_linear, args.mmap_bin_files, args.check_for_nan_in_loss_and_grad) == (False, False, False)


@pytest.mark.parametrize(
    ("flags", "function", "gated"),
    [("", F.gelu, False), ("--swiglu", F.silu, True), ("--squared-relu", squared_relu, False)],
    ids=["gelu", "swiglu", "squared-relu"],
)
def test_activation_follows_the_switches(flags, function, gated):
    config = arguments.core_transformer_config_from_args(parse(f"{TINY} {flags}"))
    assert (config.activation_func, config.gated_linear_unit) == (function, gated)


def test_query_groups_need_group_query_attention():
    args = parse(TINY + " --group-query-attention --num-query-groups 2")
    assert arguments.core_transformer_config_from_args(args).num_query_groups == 2
    lines = problems(TINY + " --num-query-groups 2")
    assert lines[0].startswith("num_query_groups=2 with group_query_attention=False")


def test_layer_pattern_is_a_list_expression():
    assert parse(MOE + " --moe-layer-freq '([0]*1+[1]*3)'").moe_layer_freq == [0, 1, 1, 1]


def test_config_objects_carry_the_arguments():
    args = parse(MOE + " --clip-grad 0.5 --ddp-bucket-size 77 --ddp-average-in-collective --bf16")
    assert arguments.optimizer_config_from_args(args).clip_grad == 0.5
    assert arguments.optimizer_config_from_args(args).bf16 is True
    ddp = arguments.ddp_config_from_args(args)
    assert (ddp.bucket_size, ddp.average_in_collective, ddp.grad_reduce_in_fp32) == (77, True, True)


def test_extra_arguments_of_a_program_are_kept():
    args = arguments.parse_args(
        [*shlex.split(TINY), "--my-flag", "4"], lambda parser: parser.add_argument("--my-flag", type=int, default=1)
    )
    assert args.my_flag == 4


def test_world_comes_from_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    args = parse(MOE + " --expert-model-parallel-size 2 --global-batch-size 16")
    assert (args.world_size, args.rank, args.data_parallel_size) == (4, 3, 4)


@pytest.mark.parametrize(
    ("flags", "subject", "text"),
    [
        ("--bf16 --fp16", "bf16=True with fp16=True", "give either --bf16 or --fp16"),
        ("--moe-router-topk 9", "moe_router_topk=9 with num_moe_experts=8", "from 1 to 8"),
        (
            "--num-experts 9 --expert-model-parallel-size 2",
            "num_moe_experts=9 with expert_model_parallel_size=2",
            "same",
        ),
        ("--global-batch-size 5", "global_batch_size=5", "multiple of micro_batch_size 2 * data_parallel_size 1 = 2"),
        ("--rampup-batch-size 2 3 10 --global-batch-size 8", "global_batch_size=5", "--rampup-batch-size|multiple"),
        ("--step-batch-size-schedule 0:4", "step_batch_size_schedule='0:4'", "--train-samples"),
        ("--hidden-size 97", "hidden_size=97 with num_attention_heads=6", "multiple of the number of heads"),
        ("--lr-warmup-iters 5", "lr_warmup_iters=5 with lr_decay_iters=5", "must be longer"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "lr_warmup_fraction=0.1", "one length"),
        ("--lr-decay-samples 9", "lr_decay_samples=9 with train_iters=5", "use --lr-decay-iters"),
        ("--train-samples 9", "train_iters=5 with train_samples=9", "a run has one length"),
        ("--min-lr 1", "min_lr=1.0 with lr=0.001", "--min-lr"),
        ("--lr-decay-style WSD", "lr_decay_style='WSD'", "--lr-wsd-decay-iters"),
        ("--start-weight-decay 0.1", "weight_decay_incr_style='constant'", "no ramp"),
        (
            "--max-position-embeddings 16",
            "max_position_embeddings=16 with seq_length=32",
            "every token needs a position",
        ),
        ("--data-path x", "data_path=['x'] with mock_data=True", "one source"),
        ("--wandb-project x", "wandb_project='x' with wandb_exp_name=None", "--wandb-exp-name"),
        (
            "--calculate-per-token-loss --ddp-average-in-collective",
            "calculate_per_token_loss=True",
            "divided by the token",
        ),
        ("--fp16-lm-cross-entropy", "fp16_lm_cross_entropy=True with fp16=False", "add --fp16"),
        ("--moe-layer-freq [1,0]", "moe_layer_freq=[1, 0] with num_layers=4", "as many entries"),
        ("--moe-layer-freq exit()", "moe_layer_freq='exit()'", "only integers, lists"),
        ("--num-layers two", "num_layers='two'", "not an integer"),
        ("--eval-global-batch-size 3", "eval_global_batch_size=3", "--eval-global-batch-size a multiple of 2"),
        ("--world-size 8", "world_size=8", "for tools that train nothing"),
        (
            "--moe-flex-dispatcher-backend hybirdep",
            "moe_flex_dispatcher_backend='hybirdep'",
            "none of hybridep, deepep",
        ),
        (
            "--device cuda --transformer-impl transformer_engine --bf16 --fp8-format hybrid --fp8-recipe rowwise",
            "transformer_impl='transformer_engine' with fp8_recipe='rowwise'",
            "use --fp8-recipe delayed, tensorwise or blockwise",
        ),
        ("--moe-token-dispatcher-type altoall", "moe_token_dispatcher_type='altoall'", "did you mean alltoall"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", "moe_router_num_groups=3", "--moe-router-num-groups"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 15",
            "seq_length=15 with tensor_model_parallel_size=2",
            "--seq-length",
        ),
        (
            "--context-parallel-size 2 --seq-length 30",
            "seq_length=30 with context_parallel_size=2",
            "make --seq-length a multiple of 2 * CP",
        ),
        (
            "--context-parallel-size 2 --tensor-model-parallel-size 3 --sequence-parallel --seq-length 32",
            "seq_length=32 with tensor_model_parallel_size=3, context_parallel_size=2",
            "a multiple of TP * CP, or drop --sequence-parallel",
        ),
        ("--context-parallel-size 2", "context_parallel_size=2 with attention_dropout=0.1", "--attention-dropout 0"),
        (
            "--tensor-model-parallel-size 2",
            "num_moe_experts=8 with tensor_model_parallel_size=2, sequence_parallel=False",
            "add --sequence-parallel",
        ),
        ("--tokenizer-type NullTokenizer", "tokenizer_type='NullTokenizer' with vocab_size=None", "--vocab-size"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_contradiction_names_values_and_remedy(flags, subject, text):
    lines = problems(f"{MOE} {flags}")
    assert any(line.startswith(subject) and any(part in line for part in text.split("|")) for line in lines), lines


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("--exp-avg-dtype fp8", "scaled moments"),
        ("--num-distributed-optimizer-instances 2", "replicas of the distributed optimizer"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "recompute of a part of multi-latent"),
        ("--main-params-dtype fp16", "main weights in other dtypes"),
        ("--moe-combine-bwd-dtype mxfp8", "narrow floats on the wire"),
        ("--multi-latent-attention", "multi-latent attention"),
        ("--mtp-num-layers 1", "multi-token prediction"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_feature_that_is_not_there_is_refused_by_name(flags, feature):
    lines = problems(f"{MOE} {flags}")
    assert any(feature in line and "not there yet" in line for line in lines), lines


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--num-expert", "did you mean --num-experts"),
        ("--micro_batch_size", "use --micro-batch-size"),
        ("--batch-size", "use --micro-batch-size"),
        ("--model-parallel-size", "use --tensor-model-parallel-size"),
        ("--fp8", "use --fp8-format"),
        ("--te-rng-track", "use --te-rng-tracker"),
        ("--zzz", "unknown flag; --help"),
        ("--moe-router", "did you mean --moe-router-"),
    ],
)
def test_unknown_flag_gets_a_suggestion(flag, answer):
    lines = problems(f"{TINY} {flag} 3")
    assert len(lines) == 1
    assert lines[0].startswith(f"{flag}:")
    assert answer in lines[0]


def test_abbreviations_are_unknown():
    assert problems(f"{TINY} --tensor-model-parallel 1")[0].startswith("--tensor-model-parallel: unknown flag")


def test_stray_word_is_named():
    assert problems(f"stray {TINY}")[0].startswith("stray: a word that belongs to no flag")


def test_missing_value_is_an_error():
    assert "--lr" in problems(TINY + " --lr")[0]


def test_everything_is_reported_at_once():
    lines = problems(f"{MOE} --bf16 --fp16 --moe-router-topk 9 --bogus --mtp-num-layers 1 --global-batch-size 3 --lr x")
    starts = (
        "lr='x'",
        "--bogus",
        "mtp_num_layers=1",
        "bf16=True with fp16",
        "moe_router_topk=9",
        "global_batch_size=3",
    )
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 6


def test_message_names_the_flag_that_was_typed():
    lines = problems(TINY + " --recompute-activations --recompute-method block")
    assert "(given: --recompute-activations)" in lines[0]


def test_world_that_tp_does_not_divide_names_both_numbers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    lines = problems(TINY + " --tensor-model-parallel-size 2")
    assert any(line.startswith("world_size=3 with tensor_model_parallel_size=2") for line in lines)


def test_deepep_needs_the_flex_dispatcher():
    lines = problems(MOE + " --moe-enable-deepep")
    assert any("moe_token_dispatcher_type='alltoall': this dispatcher has no backends" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "subject", "text"),
    [
        ("allgather", "moe_token_dispatcher_type='allgather'", "no budget of rows"),
        (
            "flex",
            "moe_expert_rank_capacity_factor=1.5 with moe_flex_dispatcher_backend='deepep'",
            "depend on the routing",
        ),
        ("flex --moe-flex-dispatcher-backend ncclep", "moe_flex_dispatcher_backend='ncclep'", "left out of this tree"),
        (
            "flex --moe-hybridep-engine collective",
            "moe_hybridep_engine='collective'",
            "no such engine; use --moe-flex-dispatcher-backend hybridep",
        ),
        (
            "flex --moe-dispatch-fwd-dtype fp8",
            "moe_dispatch_fwd_dtype='fp8' with moe_flex_dispatcher_backend='deepep'",
            "sends rows as they are; use --moe-flex-dispatcher-backend hybridep",
        ),
        (
            "flex --moe-flex-dispatcher-backend hybridep --moe-pad-expert-input-to-capacity",
            "moe_expert_rank_capacity_factor=1.5 with moe_pad_expert_input_to_capacity=True",
            "fixed number of rows",
        ),
    ],
    ids=str,
)
def test_row_budget_and_engines_need_a_dispatcher_that_has_them(flags, subject, text):
    chosen = f"--moe-token-dispatcher-type {flags}" if flags else ""
    lines = problems(f"{MOE} {chosen} --moe-expert-rank-capacity-factor 1.5")
    assert any(subject in line and text in line for line in lines), lines


def test_flex_dispatcher_is_chosen_by_its_flags():
    flags = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine collective"
    args = parse(f"{MOE} {flags} --moe-hybridep-num-sms 16 --moe-expert-rank-capacity-factor 1.5")
    assert (args.moe_token_dispatcher_type, args.moe_hybridep_engine) == ("flex", "collective")
    assert (args.moe_flex_dispatcher_num_sms, args.moe_expert_rank_capacity_factor) == (16, 1.5)


def test_choices_of_dispatchers_are_the_registry():
    specs = build_parser().specs
    assert specs["--moe-token-dispatcher-type"].choices == tuple(DISPATCHERS)
    assert specs["--moe-flex-dispatcher-backend"].choices == tuple(BACKENDS)
    assert specs["--moe-hybridep-engine"].choices == ("auto", *ENGINES)


def test_two_different_sm_counts_contradict():
    lines = problems(MOE + " --moe-deepep-num-sms 8 --moe-hybridep-num-sms 16")
    assert any("--moe-hybridep-num-sms asks for 16" in line for line in lines)


def test_deprecated_spelling_acts_with_one_notice(caplog):
    args = parse(TINY + " --use-rotary-position-embeddings")
    assert args.position_embedding_type == "rope"
    lines = [line for line in caplog.messages if "--use-rotary-position-embeddings" in line]
    assert lines == ["--use-rotary-position-embeddings is deprecated; use --position-embedding-type rope"]


def test_no_position_embedding_drops_only_a_learned_table():
    assert parse(TINY + " --no-position-embedding").position_embedding_type == "none"
    assert parse(TINY + " --no-position-embedding --position-embedding-type rope").position_embedding_type == "rope"


def test_gpu_choices_map_to_the_cpu_with_one_line_each(caplog):
    flags = "--transformer-impl transformer_engine --distributed-backend nccl --moe-permute-fusion --te-rng-tracker"
    args = parse(f"{MOE} {flags} --attention-backend flash --cross-entropy-loss-fusion --moe-router-fusion")
    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    for flag in (
        "--transformer-impl",
        "--distributed-backend",
        "--moe-permute-fusion",
        "--moe-router-fusion",
        "--cross-entropy-loss-fusion",
        "--te-rng-tracker",
        "--attention-backend",
    ):
        assert sum(line.startswith(flag) for line in caplog.messages) == 1


def test_surprising_defaults_are_one_line(caplog):
    parse(TINY)
    lines = [line for line in caplog.messages if line.startswith("defaults that surprise")]
    assert len(lines) == 1
    assert "hidden_dropout=0.1" in lines[0]
    assert "moe_" not in lines[0]


def test_flags_without_effect_in_this_model_are_announced(caplog):
    parse(TINY + " --rotary-base 5000")
    assert "--rotary-base: accepted, no effect here: positions are learned_absolute" in caplog.messages


def test_settings_of_a_feature_that_is_off_are_announced(caplog):
    parse(f"{TINY} --fp8-recipe blockwise --no-fp8-wgrad --cuda-graph-warmup-steps 3")
    assert "--fp8-recipe --no-fp8-wgrad: accepted, no effect here: no --fp8-format is given" in caplog.messages
    assert "--cuda-graph-warmup-steps: accepted, no effect here: no step is captured" in caplog.messages
    caplog.clear()
    parse(f"{TINY} --fp8-format hybrid --fp8-recipe blockwise")
    assert not any(line.startswith("--fp8-recipe") for line in caplog.messages)


def test_a_recipe_that_leaves_experts_in_bf16_is_announced(caplog):
    line = "--fp8-recipe blockwise: covers dense layers; routed experts stay in bf16"
    for flags, is_told in (("--num-experts 4 --fp8-recipe blockwise", True), ("--num-experts 4", False), ("", False)):
        caplog.clear()
        parse(f"{TINY} --fp8-format e4m3 {flags}")
        assert (line in caplog.messages) is is_told


def test_every_flag_about_experts_is_announced_in_a_dense_model(caplog):
    known = build_parser().specs
    specs = [known[spec.spellings[0]] for spec in flag_specs(MoEConfig) if spec.dest != "num_experts"]
    words = [f"{spec.spellings[0]} {'' if spec.is_switch else (spec.choices or [1])[0]}" for spec in specs]
    parse(f"{TINY} {' '.join(words)}")
    names = " ".join(spec.spellings[0] for spec in specs)
    assert f"{names}: accepted, no effect here: the model has no experts" in caplog.messages


def test_deterministic_mode_checks_the_environment(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert any(
        line.startswith("NCCL_ALGO='Tree' with deterministic_mode=True")
        for line in problems(TINY + " --deterministic-mode")
    )


def test_parsing_needs_neither_gpu_nor_process_group():
    code = (
        f"from megatron.training.arguments import parse_args; import torch; parse_args({shlex.split(MOE)!r}); "
        "raise SystemExit(torch.cuda.is_initialized() or torch.distributed.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0
