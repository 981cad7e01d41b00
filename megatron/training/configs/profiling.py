"""Which steps and ranks are profiled, and how."""

import dataclasses

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob


@dataclasses.dataclass(kw_only=True)
class ProfilingConfig(ConfigTopic):
    """Profiling."""

    profile: bool = False
    """Start and stop a profiler at the given steps."""

    profile_step_start: int = 10
    """First step that is profiled."""

    profile_step_end: int = 12
    """Step at which profiling stops."""

    profile_ranks: list[int] = knob([])
    """Ranks that are profiled; none given: all."""

    use_pytorch_profiler: bool = False
    """Use torch.profiler and write its trace into the TensorBoard folder."""

    pytorch_profiler_collect_shapes: bool = False
    """Record shapes in the trace."""

    pytorch_profiler_collect_callstack: bool = False
    """Record call stacks in the trace."""

    check_streams: bool = False
    """Check that streams use each other's work and memory in order and ranks communicate alike; stop at a finding.

    A checked step takes several times as long."""

    def check(self) -> list[Violation]:
        """The profiled steps are a range of those of the run."""
        if not self.profile:
            return []
        found = []
        if self.profile_step_start < 0:
            remedy = "set --profile-step-start to 0 or more"
            found.append(violation(self, "profile_step_start", "steps are counted from 0", remedy))
        if self.profile_step_start >= self.profile_step_end:
            names, why = "profile_step_start profile_step_end", "the range of steps is empty"
            found.append(violation(self, names, why, "raise --profile-step-end"))
        return found
