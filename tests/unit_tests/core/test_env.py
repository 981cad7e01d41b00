"""Environment variables are typed, and an unreadable one is named."""

import pytest

from megatron.core import env
from megatron.core.errors import ConfigError


def test_launcher_variables_are_read(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (env.rank(), env.world_size(), env.local_rank()) == (3, 4, 1)


def test_without_a_launcher_there_is_one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (env.rank(), env.world_size(), env.local_rank()) == (0, None, 0)


@pytest.mark.parametrize("value", ["four", "0", "-2", "1.5"])
def test_unreadable_value_is_an_error_that_names_the_variable(monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE='{value}': an integer from 1 on"):
        env.world_size()


def test_default_does_not_replace_a_users_value(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    env.set_default("NCCL_ALGO", "Ring")
    assert env.nccl_algo() == "Tree"
