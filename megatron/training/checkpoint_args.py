"""`--use-checkpoint-args`: the flags of the model and the tokenizer come from the checkpoint that a run continues.

Only what decides the shapes and the meaning of the weights is taken; how a run computes stays with the command line.
"""

import argparse
from pathlib import Path

from megatron.core.configs.architecture import ArchitectureConfig
from megatron.core.configs.flag_spec import flag_specs
from megatron.core.configs.moe import MoEConfig
from megatron.core.dist_checkpointing import load_common
from megatron.training.checkpoint_paths import folder_to_load
from megatron.training.configs.model import ModelConfig
from megatron.training.configs.tokenizer import TokenizerConfig

TOPICS = (ModelConfig, ArchitectureConfig, MoEConfig, TokenizerConfig)
OF_THE_RUN = frozenset(
    {
        "transformer_impl",
        "attention_backend",
        "attention_dropout",
        "hidden_dropout",
        "moe_grouped_gemm",
        "moe_token_dispatcher_type",
        "moe_router_force_load_balancing",
        "moe_router_force_biased",
        "moe_per_layer_logging",
        "trust_remote_code",
    }
)


def stored_destinations() -> list[str]:
    """The arguments that a checkpoint decides."""
    dests = (spec.dest for topic in TOPICS for spec in flag_specs(topic))
    return [dest for dest in dict.fromkeys(dests) if dest not in OF_THE_RUN]


def take_from_checkpoint(args: argparse.Namespace) -> None:
    """Replace the arguments of the model by the stored ones if asked to; without a checkpoint nothing changes."""
    if not args.use_checkpoint_args or args.load is None:
        return
    folder = folder_to_load(Path(args.load), args.ckpt_step, args.ckpt_fallback)
    if folder is None:
        return
    stored = load_common(folder, ["args"])["args"]
    for dest in stored_destinations():
        if dest in stored:
            setattr(args, dest, stored[dest])
            args.origins[dest] = f"checkpoint ({folder.name})"
