import pytest

from megatron.core import errors


@pytest.mark.parametrize(
    ("name", "base", "code"),
    [
        ("ConfigError", ValueError, 2),
        ("MissingDependencyError", ImportError, 1),
        ("CheckpointError", RuntimeError, 1),
        ("DataError", ValueError, 1),
    ],
)
def test_user_errors_are_what_callers_of_the_builtin_catch_and_have_an_exit_code(name, base, code):
    kind = getattr(errors, name)
    assert issubclass(kind, base)
    assert kind in errors.USER_ERRORS
    assert errors.exit_code(kind("x=1: wrong; mend it")) == code
