"""Module specs under the path that users of Megatron import."""

from megatron.core.module_api.spec_utils import ModuleSpec, build_module, get_module, import_module

__all__ = ["ModuleSpec", "build_module", "get_module", "import_module"]
