"""Who called: the nearest frames that belong neither to torch, nor to Python, nor to the checker."""

import functools
import os
import sys
import sysconfig
from types import CodeType, FrameType

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_CORE = os.path.dirname(_HERE)
_ROOT = os.path.dirname(os.path.dirname(_CORE))
_NEVER_OURS = (os.path.dirname(torch.__file__) + os.sep, _HERE + os.sep, os.path.join(_CORE, "streams.py"), "<")
_STANDARD = sysconfig.get_paths()["stdlib"]
_DISPATCH = "__torch_dispatch__"
NUM_FRAMES = 2

Site = tuple[tuple[CodeType, int], ...]


@functools.cache
def _is_ours(path: str) -> bool:
    return not path.startswith(_NEVER_OURS) and (path.startswith(_ROOT) or not path.startswith(_STANDARD))


def call_site() -> Site:
    """The innermost frames of ours, as (code, line)."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(found) < NUM_FRAMES:
        if _is_ours(frame.f_code.co_filename) and frame.f_code.co_name != _DISPATCH:
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def site_text(site: Site) -> str:
    """`file:line function < file:line function`, relative to the checkout."""
    places = [f"{os.path.relpath(code.co_filename, _ROOT)}:{line} {code.co_name}" for code, line in site]
    return " < ".join(places) or "no frame of ours"
