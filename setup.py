"""Builds the one optional extension: `megatron.core.datasets.helpers_cpp`, the fast index builder.

Everything else is in pyproject.toml. Without pybind11 or a compiler the extension is left out with one line; the NumPy
builder then gives the same bits, only slower. torch is never imported here, so that the build needs no torch.
"""

import os
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = os.path.join("megatron", "core", "datasets", "helpers.cpp")


def skip(reason):
    """Say that the extension is left out, where both pip and a terminal show it."""
    print(f"megatron-moe: C++ index builder skipped: {reason}; the NumPy builder is used instead", file=sys.stderr)


def extensions():
    """Return the list of extensions that this machine can try to build."""
    try:
        import pybind11
    except ImportError:
        skip("pybind11 is not installed")
        return []
    flags = ["/O2", "/std:c++17"] if os.name == "nt" else ["-O3", "-std=c++17", "-fvisibility=hidden"]
    return [
        Extension(
            "megatron.core.datasets.helpers_cpp",
            sources=[SOURCE],
            include_dirs=[pybind11.get_include()],
            language="c++",
            extra_compile_args=flags,
            optional=True,  # setuptools then also copes with the missing file
        )
    ]


class BuildOrSkip(build_ext):
    """Builds the extension; a missing or failing compiler leaves it out instead of ending the installation."""

    def build_extension(self, ext):
        """Compile one extension, or say in one line why it is left out."""
        try:
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and each means the same here
            skip(f"compiling {SOURCE} failed ({type(error).__name__}: {error})")


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildOrSkip})
