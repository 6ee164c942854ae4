"""Functions by name, without a name, and names that get a new function."""

import functools
import importlib
import math
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from telegrad.serialize.function_names import NameTable, NotByName, resolve
from telegrad.testing import run_all


def function(x: Any) -> Any:
    return x


class Class:
    def method(self) -> str:
        return "method"

    @classmethod
    def made(cls) -> type:
        return cls

    @staticmethod
    def static() -> str:
        return "static"

    class Inner:
        @classmethod
        def made(cls) -> type:
            return cls


class Derived(Class):
    pass


class Equal:
    """Callable, and equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(function)

    def __call__(self) -> None: ...


@functools.wraps(function)
def wrapper(x: Any) -> Any:
    return ("wrapped", x)


def round_trip(f: Any) -> Any:
    _, text = NameTable().find(f)
    return resolve(text)


@pytest.mark.parametrize(
    "f",
    [
        function,
        Class,
        Class.method,
        Class.static,
        Class.made,
        Derived.made,
        Derived.static,
        Class.Inner,
        Class.Inner.made,
        len,
        max,
        math.sqrt,
        int,
        dict.fromkeys,
        torch.add,
        torch.nn.functional.relu,
        torch.nn.functional.gelu,
        torch.nn.Linear,
        torch.Tensor,
        torch.zeros,
        torch.linalg.norm,
        importlib.import_module,
    ],
)
def test_found_again(f: Any) -> None:
    assert round_trip(f) == f


def test_a_class_method_keeps_its_class() -> None:
    assert round_trip(Derived.made)() is Derived
    assert round_trip(Class.made)() is Class


def local() -> Any:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    "f",
    [
        lambda: None,
        local(),
        Class().method,
        [].append,
        "".join,
        functools.partial(function),
        Equal(),
        wrapper,  # has another's name
        torch.ones(1).add,
        type("Class", (), {}),
        type(None),
        {}.get,
    ],
)
def test_not_by_name(f: Any) -> None:
    with pytest.raises(NotByName):
        NameTable().find(f)


def test_unhashable_objects_have_no_name() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    with pytest.raises(NotByName):
        NameTable().find(Unhashable())


def test_an_equal_object_does_not_get_the_name() -> None:
    table = NameTable()
    table.find(function)
    with pytest.raises(NotByName):
        table.find(Equal())


def test_numbers_are_given_once() -> None:
    table = NameTable()
    names = [table.find(f) for f in (function, Class, len, Class.made)]
    assert len({number for number, _ in names}) == 4
    assert 0 not in {number for number, _ in names}  # which means: no name
    assert [table.find(f) for f in (function, Class, len, Class.made)] == names
    assert table.method("a") == table.method("a")
    assert table.method("a")[0] not in {number for number, _ in names}
    assert resolve(table.method("a name")[1]) == "a name"


def test_threads_agree_on_numbers() -> None:
    for _ in range(20):
        table = NameTable()
        begin = threading.Barrier(4)

        def ask(table: NameTable = table, begin: threading.Barrier = begin) -> Any:
            begin.wait(10)
            return [table.find(f) for f in (function, Class, len)] + [table.method("m")]

        first, *others = run_all([ask] * 4)
        assert all(other == first for other in others)


# ---- names with new functions


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("changing")
    exec("def f(): return 1\nclass C:\n  def m(self): return 1", made.__dict__)
    sys.modules["changing"] = made
    yield made
    sys.modules.pop("changing", None)


def test_a_new_function_under_the_name(module: Any) -> None:
    table = NameTable()
    old = module.f
    number, text = table.find(old)
    assert resolve(text)() == 1
    exec("def f(): return 2", module.__dict__)
    assert resolve(text)() == 2  # the receiver's own
    with pytest.raises(NotByName):
        table.find(old)  # it would be the other one that runs
    _, text = table.find(module.f)
    assert resolve(text)() == 2
    module.f = old
    assert table.find(old)[0] == number


def test_a_new_method_under_the_name(module: Any) -> None:
    table = NameTable()
    old = module.C.m
    table.find(old)
    module.C.m = lambda self: 2
    with pytest.raises(NotByName):
        table.find(old)


def test_a_function_that_is_removed(module: Any) -> None:
    table = NameTable()
    old = module.f
    _, text = table.find(old)
    del module.f
    with pytest.raises(NotByName):
        table.find(old)
    with pytest.raises(AttributeError, match="'f'"):
        resolve(text)


def test_a_module_that_is_reloaded(module: Any) -> None:
    _, text = NameTable().find(module.f)
    assert resolve(text)() == 1
    again = types.ModuleType("changing")
    exec("def f(): return 2", again.__dict__)
    sys.modules["changing"] = again
    assert resolve(text)() == 2
    _, text = NameTable().find(again.f)
    assert resolve(text) is again.f


def test_a_module_that_makes_its_attributes(module: Any) -> None:
    _, text = NameTable().find(module.f)
    f = module.__dict__.pop("f")
    module.__getattr__ = lambda name: f if name == "f" else None
    assert resolve(text) is f


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"Gno_such_module\0f", ModuleNotFoundError),
        (f"G{__name__}\0nothing".encode(), AttributeError),
        (f"G{__name__}\0Class.nothing".encode(), AttributeError),
        (f"G{__name__}\0Nothing.f".encode(), AttributeError),
    ],
)
def test_names_that_do_not_exist(text: bytes, error: type[Exception]) -> None:
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(error):
            resolve(text)


# ---- definitions that other processes cannot import


def test_modules_registered_for_sending_by_value_have_no_names(module: Any) -> None:
    table = NameTable()
    known = module.f
    table.find(known)
    cloudpickle.register_pickle_by_value(module)
    try:
        for f in (known, module.C):
            with pytest.raises(NotByName):
                table.find(f)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert table.find(known)


def test_main_of_an_interactive_session_is_not_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    exec("def typed_in(): return 1", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert NameTable().find(main.typed_in)  # a script: the others run it too
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(NotByName):
        NameTable().find(main.typed_in)


def test_the_table_does_not_keep_functions_alive_that_lost_their_name(module: Any) -> None:
    import weakref

    table = NameTable()
    refs = []
    for number in range(50):  # a cell of a notebook, run again and again
        exec(f"def f(): return {number}", module.__dict__)
        table.find(module.f)
        refs.append(weakref.ref(module.f))
    assert sum(ref() is not None for ref in refs) < 50
