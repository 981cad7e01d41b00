"""Leaves multiprocessors of the device free for communication that runs beside a product.

A grouped product launches one block for each multiprocessor (SM) and takes nearly all its registers. Kernels of another
stream would begin when it ends, or push some of its blocks into a second wave. So the products beside an exchange get
fewer SMs, and the kernels of the exchange have as many blocks as fill the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def leaving_sms_free(count: int) -> Iterator[None]:
    """Let grouped products that are launched inside use all SMs but `count`; 0 changes nothing.

    Backward too, whose launches come from threads of its own. The order of sums does not depend on the number of SMs.
    Graph: capturable; a replay keeps what was captured.
    """
    if not count:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)
