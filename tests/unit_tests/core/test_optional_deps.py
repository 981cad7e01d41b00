import sys

import pytest

from megatron.core import optional_deps
from megatron.core.errors import MissingDependencyError


@pytest.fixture
def without_triton(monkeypatch):
    """As on a machine without Triton: the import machinery finds nothing under the name."""
    optional_deps._attempt.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    yield
    optional_deps._attempt.cache_clear()


@pytest.mark.parametrize("name", optional_deps.PACKAGES)
def test_every_package_names_the_step_that_installs_it(name, monkeypatch):
    optional_deps._attempt.cache_clear()
    monkeypatch.setitem(sys.modules, optional_deps.PACKAGES[name].module, None)
    assert not optional_deps.is_available(name)
    with pytest.raises(MissingDependencyError) as caught:
        optional_deps.require(name, "flag='x'")
    assert str(caught.value).startswith(f"flag='x': the package '{name}' cannot be imported (ModuleNotFoundError")
    assert str(caught.value).endswith(f"; {optional_deps.PACKAGES[name].remedy}.")
    optional_deps._attempt.cache_clear()


def test_present_package_is_returned_as_it_is(monkeypatch):
    import json

    monkeypatch.setitem(optional_deps.PACKAGES, "json", optional_deps.OptionalPackage("json", "nothing to do"))
    assert optional_deps.is_available("json")
    assert optional_deps.require("json") is json


def test_kernel_without_triton_can_be_defined_but_not_launched(without_triton):
    @optional_deps.triton_jit
    def copy_rows(x, block: optional_deps.tl.constexpr):
        pass

    @optional_deps.triton_jit(do_not_specialize=["n"])
    def fill_rows(x, n):
        pass

    with pytest.raises(MissingDependencyError, match=r"kernel 'copy_rows': the package 'triton' cannot be imported"):
        copy_rows[(1,)](None, 8)
    with pytest.raises(MissingDependencyError, match=r"pip install 'megatron-moe\[gpu\]'"):
        fill_rows(None, 1)


def test_language_without_triton_is_refused_when_called(without_triton):
    with pytest.raises(MissingDependencyError, match=r"kernel 'tl.arange'"):
        optional_deps.tl.arange(0, 8)


def test_unknown_attribute_of_the_module_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'cuda_tile'"):
        optional_deps.cuda_tile  # noqa: B018
