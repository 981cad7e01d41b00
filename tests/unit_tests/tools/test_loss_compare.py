"""Answers of the comparison of two runs to paths that hold none."""

import pytest

from tools.loss_compare import main


@pytest.mark.parametrize("flags", [[], ["--state-hash"]])
def test_missing_run_is_named(tmp_path, capsys, flags):
    assert main([str(tmp_path / "gone"), str(tmp_path), *flags]) == 1
    assert f"{tmp_path / 'gone'}: no such run; name logs" in capsys.readouterr().err
