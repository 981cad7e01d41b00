"""`--yaml-cfg FILE`: a mapping of flags to values, turned into the words of a command line.

Keys are destinations or flags, without dashes in front; sections may nest, only their leaves count. The words go
through the same parser as typed ones, so types, choices, old spellings and refusals are the same.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.core.configs.flag_spec import FlagSpec
from megatron.core.errors import ConfigError


def find_path(argv: Sequence[str]) -> str | None:
    """The file named by --yaml-cfg, if the command line has it."""
    for index, word in enumerate(argv):
        if word.startswith("--yaml-cfg="):
            return word.partition("=")[2]
        if word == "--yaml-cfg" and index + 1 < len(argv):
            return argv[index + 1]
    return None


def words_from_file(path: str, specs: dict[str, FlagSpec]) -> list[str]:
    """Read the file; every key must be known."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"yaml_cfg={path!r}: cannot be read ({reason}); correct --yaml-cfg") from error
    if not isinstance(content, dict):
        raise ConfigError(f"yaml_cfg={path!r}: holds no mapping of flags to values; write `flag: value` lines")
    words: list[str] = []
    for key, value in _leaves(content):
        words.extend(_words(key, value, specs))
    return words


def _leaves(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield str(key), value


def _words(key: str, value: Any, specs: dict[str, FlagSpec]) -> list[str]:
    flag = "--" + key.replace("_", "-").lstrip("-")
    by_dest = [spec for spec in specs.values() if spec.dest == key]
    spec = specs.get(flag) or (by_dest[0] if by_dest else None)
    if value is None:
        return []
    if spec is None:
        return [flag]
    if spec.is_switch:
        wanted = value if flag not in specs or spec.dest == key else (spec.const if value else not spec.const)
        return [spec.spellings[0]] if wanted == spec.const else []
    listed = value if isinstance(value, list) and spec.nargs is not None else [value]
    return [spec.spellings[0], *(str(entry) for entry in listed)]
