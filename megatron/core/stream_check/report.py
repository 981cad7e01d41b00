"""Findings as text: what, which tensor, both operations with stream, stage and source lines, and what is missing.

read without order: tensor bfloat16 [24, 8] of c10d.alltoall_base_
  first  c10d.alltoall_base_ on comm in F0.1 dispatch at .../collectives.py:99 all_to_all < .../exchange.py:81 run
  then   aten.mm on compute in F0.1 experts at .../experts.py:40 forward
  compute has not waited for comm
"""

from collections.abc import Sequence

from megatron.core.stream_check.clocks import Operation
from megatron.core.stream_check.rules import Finding, name_of
from megatron.core.stream_check.sites import site_text

MAX_SHOWN = 20


def operation_text(operation: Operation) -> str:
    """One operation: name, stream, stage, source lines."""
    stage = f" in {operation.stage}" if operation.stage else ""
    return f"{operation.name} on {name_of(operation.stream)}{stage} at {site_text(operation.site)}"


def finding_text(finding: Finding) -> str:
    """One finding, over several lines."""
    lines = [finding.kind.value + (f": {finding.tensor}" if finding.tensor else "")]
    if finding.first is not None:
        lines.append(f"  first  {operation_text(finding.first)}")
    if finding.then is not None:
        lines.append(f"  then   {operation_text(finding.then)}")
    if finding.remedy:
        lines.append(f"  {finding.remedy}")
    return "\n".join(lines)


def report(findings: Sequence[Finding], rank: int, num_operations: int) -> str:
    """All findings of a rank; the first line counts them."""
    shown = [finding_text(finding) for finding in findings[:MAX_SHOWN]]
    if len(findings) > MAX_SHOWN:
        shown.append(f"and {len(findings) - MAX_SHOWN} more")
    head = f"stream check: rank {rank}: {len(findings)} findings in {num_operations} operations"
    return "\n".join([head, *shown])
