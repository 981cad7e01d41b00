"""The status table of README.md comes from the rule tables."""

import pytest

from tools import status_table


def test_table_tells_what_works_from_what_is_missing():
    lines = status_table.render().split("\n")
    assert any(line.startswith("| works | training loop | `--micro-batch-size`") for line in lines)
    assert any(line.startswith("| not yet | multi-token prediction | `--mtp-num-layers`") for line in lines)
    assert any(line.startswith("| left out | Megatron-FSDP |") for line in lines)
    assert any(line.startswith("| works | pipeline parallelism | `--pipeline-model-parallel-size`") for line in lines)


def test_check_fails_until_the_table_is_written(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{status_table.BEGIN}\nold\n{status_table.END}\nafter\n")
    options = ["--readme", str(readme)]
    assert status_table.main([*options, "--check"]) == 1
    assert status_table.main(options) == 0
    assert status_table.main([*options, "--check"]) == 0
    assert readme.read_text().startswith("before\n")
    assert readme.read_text().endswith("\nafter\n")


def test_missing_markers_are_an_error(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing\n")
    with pytest.raises(SystemExit, match="needs the markers"):
        status_table.main(["--readme", str(readme)])
