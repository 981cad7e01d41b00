"""Exact integer division for sizes that must split evenly (heads over ranks, experts over ranks, ...)."""

from megatron.core.errors import ConfigError


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise `ConfigError` naming both numbers unless `denominator` divides `numerator`."""
    if denominator <= 0 or numerator % denominator != 0:
        raise ConfigError(f"{numerator} / {denominator}: must divide without remainder; change one of the two sizes.")


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator` as an integer; refuses a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator
