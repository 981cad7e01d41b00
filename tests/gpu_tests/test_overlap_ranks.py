"""The combined schedule between ranks that share one GPU, over NCCL: equal bits, last weight gradients, a profile."""

import re

import pytest
import torch

from tests.common.shared_gpu import run_ranks
from tools.run_metrics import parse_state_hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = (
    "--device cuda --transformer-impl local --bf16 --num-layers 2 --hidden-size 128 --num-attention-heads 4 "
    "--seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm "
    "--moe-layer-freq ([1]+[0]) --moe-shared-expert-intermediate-size 64 --expert-model-parallel-size 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 1 --global-batch-size 6 --lr 1e-2 --train-iters 4 --tokenizer-type NullTokenizer "
    "--vocab-size 500 --mock-data --num-workers 0 --log-interval 1 --eval-iters 0 "
    "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather "
)
EXACT = "--deterministic-mode --log-state-hash "
DISPATCHERS = {
    "alltoall": "--moe-token-dispatcher-type alltoall ",
    "flex": "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine collective ",
}
OVERLAP = "--overlap-moe-expert-parallel-comm "
DELAYED = f"{OVERLAP}--delay-wgrad-compute --ep-overlap-early-attn-memory-release "
PIPELINE = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
    "--moe-layer-freq ([1]+[0]+[1]+[1]) --global-batch-size 8 --train-iters 3 "
)


def hashes_and_counts(num_ranks, lines, folder, limit_s):
    """Of each command line: state hashes by step, and what the first rank counted."""
    logs = run_ranks(num_ranks, [line.split() for line in lines], folder, limit_s)
    hashes = [parse_state_hashes("".join(rank[i] for rank in logs)) for i in range(len(lines))]
    counts = [dict(re.findall(r"'([a-z ]+)': (\d+)", rank[rank.index("counters:") :])) for rank in logs[0]]
    return hashes, [{name: int(count) for name, count in found.items()} for found in counts], logs


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_overlap_changes_no_bit_between_ranks(tmp_path, dispatcher):
    line = MODEL + EXACT + DISPATCHERS[dispatcher]
    lines = [line, line, line + OVERLAP, f"{line}{DELAYED}--log-overlap"]
    (first, second, overlap, delayed), counts, logs = hashes_and_counts(2, lines, tmp_path, 110)
    print(counts, re.findall(r"hidden communication: [\d.]+", "".join(rank[3] for rank in logs)))
    assert len(first) == 4
    assert first == second, "not deterministic: nothing can be compared"
    assert overlap == first
    assert delayed == first
    assert "pairs overlapped" not in counts[0]
    assert counts[2]["pairs overlapped"] == counts[3]["pairs overlapped"] == 8
    assert counts[3]["wgrads deferred"] > 0
    shares = [float(share) for rank in logs for share in re.findall(r"hidden communication: ([\d.]+)", rank[3])]
    assert len(shares) == 4
    assert all(0 <= share <= 1 for share in shares)
    assert max(shares) > 0


def test_last_weight_gradients_hide_messages_and_change_no_bit(tmp_path):
    line = MODEL + EXACT + DISPATCHERS["alltoall"] + PIPELINE
    (off, delayed), counts, _ = hashes_and_counts(4, [line, line + DELAYED], tmp_path, 110)
    print(counts)
    assert len(off) == 3
    assert delayed == off
    assert counts[1]["wgrads behind a send"] > 0


def test_ranks_are_silent_under_the_stream_checker(tmp_path):
    line = f"{MODEL}{DISPATCHERS['alltoall']}--ddp-bucket-size 20000 --check-streams "
    lines = [line + DELAYED, f"{line}{PIPELINE}--expert-model-parallel-size 1"]
    (first, _) = run_ranks(2, [line.split() for line in lines], tmp_path, 110)
    assert all("stream check: no findings" in log for log in first)


SIZES = (
    "--num-layers 3 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--moe-layer-freq 1 --moe-ffn-hidden-size 1024 --num-experts 8 --micro-batch-size 2 --global-batch-size 16 "
)


def test_profile_of_ranks_tells_kinds_of_communication(tmp_path):
    line = f"tools/profile_overlap.py {MODEL}{DISPATCHERS['alltoall']}{SIZES}{DELAYED}"
    logs = run_ranks(2, [line.split()], tmp_path, 110)
    for rank in logs:
        report = rank[0][rank[0].index("communication  ") :]
        print(report)
        rows = {row.rsplit(maxsplit=2)[0]: row.split()[-2:] for row in report.splitlines()[1:] if row.strip()}
        assert {"dispatch", "combine", "reduce-scatter", "all-gather", "all"} <= set(rows)
        for time_ms, share in rows.values():
            assert float(time_ms) > 0
            assert 0 <= float(share.rstrip("%")) <= 100
        assert float(rows["dispatch"][1].rstrip("%")) > 0
