"""`--explain-config`: every value with its origin, the verdict of every rule, and notes about this machine."""

import argparse

import torch

from megatron.core.configs.compat import RULES
from megatron.core.configs.flag_spec import flag_specs
from megatron.core.optional_deps import PACKAGES, is_available
from megatron.training.argument_factory import TOPICS, GivenArguments
from megatron.training.check_rules import TRAINING_RULES

OPTIONAL_FOR = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb"}
TOKENIZER_PACKAGES = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
    "HuggingFaceTokenizer": "transformers",
}


def report(args: argparse.Namespace, given: GivenArguments, problems: list[str]) -> str:
    """The whole answer as text."""
    lines = ["Values"]
    lines += _values(args)
    lines += ["", f"Rules ({len(RULES) + len(TRAINING_RULES)} checked between topics)"]
    lines += [f"  refused  {problem}" for problem in problems] or ["  all hold"]
    lines += ["", "Start-up lines"]
    lines += [f"  {notice}" for notice in given.notices] or ["  none"]
    lines += ["", "Notes about this machine (no verdict)"]
    lines += [f"  {note}" for note in machine_notes(args)]
    return "\n".join(lines)


def _values(args: argparse.Namespace) -> list[str]:
    lines = []
    shown: set[str] = set()
    for title, topic in TOPICS.items():
        lines.append(f"  {title}")
        for spec in flag_specs(topic):
            if spec.dest not in shown:
                shown.add(spec.dest)
                lines.append(_value_line(args, spec.dest))
    lines.append("  World")
    lines += [_value_line(args, dest) for dest in ("world_size", "data_parallel_size", "params_dtype")]
    return lines


def _value_line(args: argparse.Namespace, dest: str) -> str:
    return f"    {dest} = {getattr(args, dest)!s}  [{args.origins.get(dest, 'default')}]"


def machine_notes(args: argparse.Namespace) -> list[str]:
    """Packages that the configuration asks for and that are absent, and what the GPU is."""
    needed = [package for dest, package in OPTIONAL_FOR.items() if getattr(args, dest)]
    needed += [TOKENIZER_PACKAGES[args.tokenizer_type]] if args.tokenizer_type in TOKENIZER_PACKAGES else []
    needed += ["transformer_engine"] if args.transformer_impl == "transformer_engine" else []
    notes = [f"package {name} is missing: {PACKAGES[name].remedy}" for name in needed if not is_available(name)]
    if not torch.cuda.is_available():
        notes.append("no GPU: device auto means cpu, collectives run through gloo")
    else:
        major, minor = torch.cuda.get_device_capability()
        notes.append(f"GPU of compute capability {major}.{minor}")
        if args.moe_grouped_gemm and major < 8:
            notes.append("moe_grouped_gemm: the grouped GEMM needs compute capability 8.0")
    return notes
