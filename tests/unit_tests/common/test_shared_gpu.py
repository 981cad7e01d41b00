"""Programs in processes of their own, one after the other in the same ones."""

import pytest

from tests.common.shared_gpu import run_ranks

SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == sys.argv[1] else 0)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.full
def test_each_rank_runs_each_line(tmp_path, script):
    logs = run_ranks(2, [[script, "0", "0"], [script, "1", "0"]], tmp_path / "logs", 60)
    assert [[text.splitlines()[1] for text in log] for log in logs] == [
        ["rank 0 of 2 0 0", "rank 0 of 2 1 0"],
        ["rank 1 of 2 0 0", "rank 1 of 2 1 0"],
    ]


@pytest.mark.full
def test_status_of_a_rank_that_fails_is_an_error(tmp_path, script):
    with pytest.raises(AssertionError, match="rank 1 of 2 1 3"):
        run_ranks(2, [[script, "1", "3"]], tmp_path / "logs", 60)
