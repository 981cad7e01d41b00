"""pretrain_gpt.py for stages under `shared_gpu.run_ranks`, with a note of how far the device of a rank has come.

A number on the device is raised behind every action of a plan and every message that was waited for, eagerly or as a
node of a graph. Shortly before the time is over a copy on a stream of its own reads it, while the rank may wait for
ever. The flags are those of pretrain_gpt.py.
"""

import runpy
from functools import cache
from pathlib import Path

import torch

from megatron.core.pipeline_parallel.executor import PlanRun
from megatron.core.pipeline_parallel.p2p import Mailbox
from tests.common import stage_progress
from tests.common.shared_gpu import before_the_limit


class Progress:
    """Steps of the plan that runs, in the order of the compute stream."""

    def __init__(self):
        self.names, self.count = [], None

    def begun(self, execute):
        def wrapper(run):
            if self.count is None:
                self.count = torch.zeros(1, dtype=torch.int64, device=next(run.context.chunks[0].parameters()).device)
            self.count.zero_()
            self.names.clear()
            return execute(run)

        return wrapper

    def counted(self, call, name):
        def wrapper(owner, *args):
            result = call(owner, *args)
            self.count.add_(1)
            self.names.append(f"{name} {args[0]}")
            return result

        return wrapper

    def report(self):
        if self.count is None:
            print("progress: no plan has begun", flush=True)
            return
        print(f"progress: the host knows {len(self.names)} steps of the plan", flush=True)
        if self.count.is_cuda:
            with torch.cuda.stream(torch.cuda.Stream()):
                done = int(self.count.cpu())
        else:
            done = int(self.count)
        behind, coming = self.names[max(done - 2, 0) : done], self.names[done : done + 2]
        print(f"progress: the device has done {done}, last {behind}, then come {coming}", flush=True)


@cache
def install():
    """Note the progress of all plans of this process."""
    progress = Progress()
    PlanRun.execute = progress.begun(PlanRun.execute)
    PlanRun._run = progress.counted(PlanRun._run, "did")
    Mailbox.take = progress.counted(Mailbox.take, "got")
    before_the_limit(progress.report)


if __name__ == "__main__":
    stage_progress.install()  # of the module, not of this program, which may run more than once in a process
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "pretrain_gpt.py"), run_name="__main__")
