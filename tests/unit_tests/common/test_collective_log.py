"""The log of collectives and the comparison between ranks."""

import torch
import torch.distributed as dist

from tests.common.collective_log import CollectiveLog, Record, compare_logs


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def issue_every_kind():
    with CollectiveLog() as log:
        x = torch.ones(4, requires_grad=True)
        _Double.apply(x).sum().backward()
        rank = dist.get_rank()
        splits = [1, 3] if rank == 0 else [3, 1]
        dist.all_to_all_single(torch.empty(4), torch.ones(4), splits, splits)
        dist.broadcast(torch.ones(2, dtype=torch.int64), 0)
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.ones(5), 0)
    return log.records


def swap_two_all_reduces():
    groups = [dist.new_group([0, 1], group_desc=role) for role in ("tp", "ep")]
    order = groups if dist.get_rank() == 0 else groups[::-1]
    with CollectiveLog() as log:
        for work in [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in order]:
            work.wait()
    return log.records


def record(op="allreduce_", role="dp", ranks=(0, 1), numels=(4,), **extra):
    return Record(op, role, ranks, "float32", numels, ("a.py:1 f",), **extra)


def test_every_kind_is_seen_also_in_backward(pool):
    logs = pool.run(issue_every_kind)
    assert [r.op for r in logs[0]] == ["allreduce_", "alltoall_base_", "broadcast_", "barrier", "send"]
    assert [r.op for r in logs[1]] == ["allreduce_", "alltoall_base_", "broadcast_", "barrier", "recv_"]
    assert logs[0][0].where[0].endswith(" backward")
    assert "test_collective_log.py" in logs[0][0].where[0]
    assert (logs[0][1].send_numels, logs[0][1].receive_numels) == ((1, 3), (1, 3))
    assert (logs[0][2].dtype, logs[0][4].peer, logs[1][4].peer) == ("int64", 1, 0)
    assert logs[0][0].group == "default[0, 1]"


def test_equal_logs_have_no_finding(pool):
    logs = pool.run(issue_every_kind)
    logs[1][1:2] = [
        Record("alltoall_base_", "default", (0, 1), "float32", (4, 4), (), send_numels=(3, 1), receive_numels=(3, 1))
    ]
    assert compare_logs(logs) == []


def test_swapped_all_reduces_are_reported_without_a_hang(pool):
    (finding,) = compare_logs(pool.run(swap_two_all_reduces))
    assert finding.startswith("order of the groups shared by ranks 0 and 1, call 0: rank 0 has allreduce_ tp[0, 1]")
    assert "rank 1 has allreduce_ ep[0, 1]" in finding
    assert "swap_two_all_reduces" in finding


def test_missing_call_is_reported_with_its_place():
    (finding,) = compare_logs([[record(), record()], [record()]])
    assert "group dp[0, 1], call 1: rank 0 has allreduce_" in finding
    assert "rank 1 has nothing" in finding


def test_other_size_is_reported():
    assert "float32 [4] at" in compare_logs([[record()], [record(numels=(5,))]])[0]


def test_all_to_all_that_expects_other_sizes_is_reported():
    a = record("alltoall_base_", "ep", send_numels=(1, 2), receive_numels=(1, 7))
    b = record("alltoall_base_", "ep", send_numels=(7, 1), receive_numels=(3, 1))
    assert "rank 0 sends 2 elements to rank 1, which expects 3" in compare_logs([[a], [b]])[0]


def test_send_without_receive_is_reported():
    assert "messages from rank 0 to rank 1, call 0" in compare_logs([[record("send", peer=1)], []])[0]


def test_groups_that_do_not_overlap_may_differ():
    assert compare_logs([[record(ranks=(0,))], [record(ranks=(1,), numels=(9,))]]) == []


def test_counts_are_by_op_and_role():
    log = CollectiveLog()
    log._records.extend([record(), record(role="ep"), record()])
    assert (log.count("allreduce_"), log.count("allreduce_", "ep"), log.counts()[("allreduce_", "dp")]) == (3, 1, 2)
