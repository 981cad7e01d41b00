"""The command line of a training run: `parse_args`, and configuration objects made from its result.

    cut and convert -> map old spellings -> defaults -> derived values -> every rule -> one error, or the arguments

Nothing here touches a device or a process group.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megatron.core import env
from megatron.core.configs.base import ConfigTopic
from megatron.core.configs.flag_spec import NO_FLAG, flag_specs
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.distributed.ddp_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.utils.logging import get_logger
from megatron.training import check_config, explain_config, yaml_config
from megatron.training.argument_factory import TOPICS, GivenArguments, Parser, build_parser, read_command_line
from megatron.training.checkpoint_args import take_from_checkpoint
from megatron.training.model_fields import model_overrides

logger = get_logger(__name__)

ConfigT = TypeVar("ConfigT", bound=ConfigTopic)


def parse_args(
    argv: Sequence[str] | None = None, extra_args_provider: Callable[[Any], Any] | None = None
) -> argparse.Namespace:
    """Parse and validate a command line; derived values are filled in.

    Args:
        argv: the words; None takes those of this process.
        extra_args_provider: called with the parser to add flags of a program's own.

    Raises:
        ConfigError: everything that is wrong, one line each.
        CheckpointError: --use-checkpoint-args, and the checkpoint is not readable.
        SystemExit: --help or --explain-config were answered.
    """
    parser = build_parser(extra_args_provider)
    given = read_command_line(parser, _with_yaml(parser, list(sys.argv[1:] if argv is None else argv)))
    args = fill_defaults(parser, given)
    take_from_checkpoint(args)
    check_config.set_world(args, given)
    check_config.map_to_device(args, given)
    problems = given.problems + check_config.judge_flag_table(args, given)
    drafts = _derive_topics(args)
    check_config.derive_training(args)
    problems += check_config.judge(args, drafts, given)
    if args.explain_config:
        sys.stdout.write(explain_config.report(args, given, problems) + "\n")
        raise SystemExit(2 if problems else 0)
    if problems:
        raise ConfigError("\n".join(problems))
    _announce(args, given)
    return args


def fill_defaults(parser: Parser, given: GivenArguments) -> argparse.Namespace:
    """All destinations with their default or given value; `origins` says which."""
    args = argparse.Namespace(**given.extra)
    args.origins = {}
    for spec in parser.specs.values():
        setattr(args, spec.dest, given.values.get(spec.dest, spec.default))
        spelling = given.spellings.get(spec.dest)
        args.origins[spec.dest] = f"command line ({spelling})" if spelling else "default"
    return args


def config_from_args(cls: type[ConfigT], args: argparse.Namespace, **overrides: Any) -> ConfigT:
    """Build a configuration dataclass from the arguments that carry the names of its fields or of their flags."""
    return cls(**_values_of(cls, args, overrides))


def core_transformer_config_from_args(args: argparse.Namespace) -> TransformerConfig:
    """The model's configuration."""
    return config_from_args(TransformerConfig, args, **model_overrides(args))


def optimizer_config_from_args(args: argparse.Namespace) -> OptimizerConfig:
    """The optimizer's configuration."""
    return config_from_args(OptimizerConfig, args)


def ddp_config_from_args(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """The configuration of gradient buffers and their reduction."""
    return config_from_args(DistributedDataParallelConfig, args)


def _values_of(cls: type[ConfigTopic], args: argparse.Namespace, overrides: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    dests = {spec.field: spec.dest for spec in flag_specs(cls)}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hidden = field.metadata.get("flag") == NO_FLAG
        value = getattr(args, field.name if hidden else dests[field.name], None)
        if value is not None:
            values[field.name] = list(value) if isinstance(value, list) else value
    values.update(overrides)
    return values


def _derive_topics(args: argparse.Namespace) -> list[ConfigTopic]:
    """Draft every topic, and copy what it derived back into the arguments."""
    drafts = []
    for cls in TOPICS.values():
        draft = cls.draft(**_values_of(cls, args, model_overrides(args) if cls is TransformerConfig else {}))
        dests = {spec.field: spec.dest for spec in flag_specs(cls)}
        for name, source in draft.origins.items():
            dest = dests.get(name, name)
            if getattr(args, dest, None) != getattr(draft, name):
                setattr(args, dest, getattr(draft, name))
                args.origins[dest] = f"derived from {source}"
        drafts.append(draft)
    return drafts


def _with_yaml(parser: Parser, argv: list[str]) -> list[str]:
    """Put the words of --yaml-cfg in front of the command line, which so has the last word."""
    path = yaml_config.find_path(argv)
    return argv if path is None else yaml_config.words_from_file(path, parser.specs) + argv


def _announce(args: argparse.Namespace, given: GivenArguments) -> None:
    """One line for each notice, on the first rank; handlers are not set up yet, so nothing else is printed."""
    if env.rank() == 0:
        for notice in given.notices:
            logger.warning(notice)
