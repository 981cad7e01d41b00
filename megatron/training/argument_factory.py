"""From configuration topics and the flag table to a command line: the parser, and what a user gave it.

argparse only cuts the line into flags and words. The words are converted here, so that every mistake is found in one
go, values that are known but missing are refused by name, and each value remembers the spelling it came from.
"""

import argparse
import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.configs.base import ConfigTopic
from megatron.core.configs.flag_spec import FlagSpec, flag_specs
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.distributed.ddp_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.moe.dispatchers.hybridep.engine import AUTO, BACKENDS, ENGINES
from megatron.core.transformer.moe.token_dispatcher import DISPATCHERS
from megatron.training import flag_table, legacy_flags
from megatron.training.configs.checkpoint import CheckpointConfig
from megatron.training.configs.data import DataConfig
from megatron.training.configs.distributed import DistributedConfig
from megatron.training.configs.logging import LoggingConfig
from megatron.training.configs.model import ModelConfig
from megatron.training.configs.profiling import ProfilingConfig
from megatron.training.configs.scheduler import SchedulerConfig
from megatron.training.configs.tokenizer import TokenizerConfig
from megatron.training.configs.training import TrainingConfig
from megatron.training.flag_table.rows import switch, value

TOPICS: dict[str, type[ConfigTopic]] = {
    "Model assembly": ModelConfig,
    "Model": TransformerConfig,
    "Process groups": DistributedConfig,
    "Gradient buffers": DistributedDataParallelConfig,
    "Training loop": TrainingConfig,
    "Optimizer": OptimizerConfig,
    "Schedules of learning rate and weight decay": SchedulerConfig,
    "Data": DataConfig,
    "Tokenizer": TokenizerConfig,
    "Checkpoints": CheckpointConfig,
    "Logging": LoggingConfig,
    "Profiling": ProfilingConfig,
}

CHOICES: dict[str, tuple[str, ...]] = {
    "moe_token_dispatcher_type": tuple(DISPATCHERS),
    "moe_flex_dispatcher_backend": tuple(BACKENDS),
    "moe_hybridep_engine": (AUTO, *ENGINES),
}
"""Flags whose values are the entries of a registry."""

COMMANDS: tuple[FlagSpec, ...] = (
    switch("--explain-config"),
    value("--yaml-cfg", str),
    value("--world-size", int),
)
"""Flags that are answered while the command line is read."""


@dataclasses.dataclass
class GivenArguments:
    """What stands on the command line, converted, with the problems found on the way."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    spellings: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    unreadable: set[str] = dataclasses.field(default_factory=set)


class Parser(argparse.ArgumentParser):
    """argparse with whole flag names only; a broken line is a ConfigError."""

    def __init__(self) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.HelpFormatter)
        self.specs: dict[str, FlagSpec] = {}

    def add_flag(self, group: argparse._ArgumentGroup, spec: FlagSpec) -> None:
        """Add one flag; its words are kept as text."""
        for spelling in spec.spellings:
            if spelling in self.specs:
                raise RuntimeError(f"{spelling} is defined twice")
            self.specs[spelling] = spec
        options: dict[str, Any] = {"nargs": spec.nargs}
        if not spec.is_switch:
            options["metavar"] = spec.spellings[0].strip("-").rsplit("-", 1)[-1].upper()
        known = f" ({' | '.join(str(choice) for choice in spec.choices)})" if spec.choices else ""
        text = f"{spec.help}{known} [{spec.default}]".replace("%", "%%")
        group.add_argument(
            *spec.spellings, dest=spec.dest, default=argparse.SUPPRESS, action=_Record, help=text, **options
        )

    def error(self, message: str) -> None:  # type: ignore[override]
        """Report a line that cannot be cut into flags and words."""
        raise ConfigError(f"command line: {message}; --help lists all flags")


class _Record(argparse.Action):
    """Keeps the words of a flag and the spelling that was used."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, (option, values))


def build_parser(extra_args_provider: Callable[[Parser], Any] | None = None) -> Parser:
    """The parser of all flags: one group for each topic, one for each feature of the flag table."""
    parser = Parser()
    seen: set[str] = set()
    group = parser.add_argument_group("Configuration")
    for spec in COMMANDS:
        parser.add_flag(group, spec)
    for title, topic in TOPICS.items():
        group = parser.add_argument_group(title)
        for spec in flag_specs(topic):
            if spec.dest not in seen:
                parser.add_flag(group, dataclasses.replace(spec, choices=CHOICES.get(spec.dest, spec.choices)))
                seen.add(spec.dest)
    for feature in flag_table.FEATURES:
        title = f"{feature.name} ({feature.status.replace('_', ' ')})"
        group = parser.add_argument_group(title[0].upper() + title[1:])
        for spec in feature.flags:
            parser.add_flag(group, spec)
    group = parser.add_argument_group("Deprecated spellings")
    for alias in legacy_flags.ALIASES:
        parser.add_flag(group, alias.flag)
    if extra_args_provider is not None:
        extra_args_provider(parser)
    return parser


def read_command_line(parser: Parser, argv: Sequence[str]) -> GivenArguments:
    """Cut and convert a command line, and map deprecated spellings; problems are collected, not raised."""
    namespace, rest = parser.parse_known_args(list(argv))
    given = GivenArguments()
    acting = {spec.dest: spec for spec in parser.specs.values()}
    for dest, recorded in vars(namespace).items():
        if dest not in acting:
            given.extra[dest] = recorded
            continue
        spelling, words = recorded
        try:
            given.values[dest] = convert(acting[dest], words)
            given.spellings[dest] = spelling
        except ValueError as error:
            given.unreadable.add(dest)
            given.problems.append(f"{dest}={_shown(words)}: {error} (given: {spelling})")
    given.problems.extend(_unknown(rest, parser))
    legacy_flags.apply_aliases(given)
    return given


def convert(spec: FlagSpec, words: Any) -> Any:
    """Turn the words of a flag into its value; ValueError says what is wrong and what would be right."""
    if spec.is_switch:
        return spec.const
    if isinstance(words, list):
        return [_convert_word(spec, word) for word in words]
    return _convert_word(spec, words)


def _convert_word(spec: FlagSpec, word: str) -> Any:
    kinds = {int: "an integer", float: "a number"}
    convert_word = spec.type or str
    try:
        converted = convert_word(word)
    except ValueError as error:
        if convert_word in kinds:
            raise ValueError(f"not {kinds[convert_word]}; give {kinds[convert_word]}") from error
        raise ValueError(f"{error}; correct it") from error
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ValueError("not a finite number; give one")
    if isinstance(converted, int) and not -(2**63) <= converted < 2**63:
        raise ValueError("an integer of 64 bits; give a smaller one")
    if spec.choices is None or converted in spec.choices:
        return converted
    for row in flag_table.VALUES:
        if row.dest == spec.dest and converted in row.values:
            raise ValueError(f"{row.feature}: {flag_table.STATES[row.status]}; {row.remedy}")
    known = [str(choice) for choice in spec.choices]
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]}" if close else "choose one of them"
    raise ValueError(f"none of {', '.join(known)}; {hint}")


def _shown(words: Any) -> str:
    return repr(words) if isinstance(words, str) else " ".join(words)


def _unknown(rest: Sequence[str], parser: Parser) -> list[str]:
    """One problem for each unknown flag; a word behind one belongs to it."""
    problems = []
    after_flag = False
    for word in rest:
        if word.startswith("--"):
            problems.append(legacy_flags.explain_unknown(word.split("=")[0], list(parser.specs)))
            after_flag = True
        elif not after_flag:
            problems.append(f"{word}: a word that belongs to no flag; remove it or put its flag in front")
    return problems
