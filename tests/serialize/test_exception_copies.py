"""Copies of exceptions that are stored to be raised again."""

from typing import Any

import pytest

from telegrad.serialize.tracebacks import clone_exception, set_cause


class OtherArgs(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Frozen(OtherArgs):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.__dict__["is_frozen"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if "is_frozen" in self.__dict__:
            raise AttributeError(f"cannot set {name}")
        super().__setattr__(name, value)


class CopiesAsItself(Exception):
    def __copy__(self) -> "CopiesAsItself":
        return self


class ReducesToAnother(Exception):
    def __reduce__(self) -> Any:
        return ValueError, self.args


@pytest.mark.parametrize(
    "error", [OtherArgs(1, "x"), Frozen(1, "x"), CopiesAsItself(1), ReducesToAnother(1)], ids=lambda e: type(e).__name__
)
def test_every_class_has_copies_so_that_the_stored_exception_gets_no_frames(error: Exception) -> None:
    set_cause(error, KeyError("cause"))
    again = clone_exception(error)
    assert again is not error
    assert type(again) is type(error)
    assert (again.args, vars(again), again.__cause__) == (error.args, vars(error), error.__cause__)
    with pytest.raises(type(error)):
        raise again
    assert error.__traceback__ is None
