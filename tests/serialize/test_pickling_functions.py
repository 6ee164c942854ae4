"""Functions and classes: sent by name if possible, otherwise by value."""

import functools
import sys
import types

import cloudpickle
import pytest
import torch
from serialize_helpers import pickle_pair

from telegrad.serialize.pickle_by_value import is_found_by_name
from telegrad.serialize.pickling import Serializer

dumps, loads = Serializer().dumps, Serializer().loads

COUNTER = []


def top_level(x):
    COUNTER.append(x)
    return x + 1


def twice(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(function(*args))

    return wrapper


@twice
def decorated(x):
    return x * 3


class Methods:
    base = 10

    def method(self, x):
        return self.base + x

    @classmethod
    def of_class(cls, x):
        return cls.base + x

    @staticmethod
    def of_none(x):
        return x

    class Inner: ...


@pytest.mark.parametrize(
    "function",
    [
        top_level,
        decorated,
        Methods,
        Methods.Inner,
        Methods.method,
        Methods.of_none,
        len,
        torch.relu,
        torch.nn.Linear,
        functools.partial,
    ],
    ids=lambda function: function.__qualname__ if hasattr(function, "__qualname__") else "partial",
)
def test_functions_with_a_name_arrive_as_the_same_object(function):
    assert pickle_pair({0: function, 1: {2}})[0] is function
    assert len(dumps(function)[0]) < 250


def test_methods_are_bound_to_what_arrives():
    bound = Methods()
    bound.base = 5
    assert pickle_pair(bound.method)(1) == 6
    assert pickle_pair(Methods.of_class).__func__ is Methods.of_class.__func__
    assert pickle_pair(functools.partial(top_level, 4))() == 5


def test_lambdas_and_closures():
    offset = torch.ones(2)

    def closure(x):
        return x + offset

    double, add, nested = pickle_pair([lambda x: 2 * x, closure, lambda: [closure, lambda: offset]])
    assert double(4) == 8
    assert add(1).tolist() == [2, 2]
    assert nested()[0] is add
    assert nested()[1]().tolist() == [1, 1]


def test_tensors_in_closures_go_out_of_band():
    big = torch.ones(10_000)
    body, [(address, nbytes, _)] = dumps(lambda: big)
    assert (address, nbytes) == (big.data_ptr(), 40_000)
    assert len(body) < 5000


def test_functions_used_by_a_lambda_stay_references():
    COUNTER.clear()
    assert pickle_pair(lambda x: top_level(x))(1) == 2
    assert COUNTER == [1]


def test_local_classes():
    class Local:
        def __init__(self, x):
            self.x = x

        def get(self):
            return self.x

    arrived = pickle_pair(Local(torch.ones(2)))
    assert arrived.get().tolist() == [1, 1]
    kind, instance = pickle_pair([Local, Local(1)])
    assert type(instance) is kind


def test_recursive_closures():
    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    assert pickle_pair(factorial)(5) == 120


def test_a_renamed_class_goes_by_value():
    Renamed = type("NoSuchName", (), {"x": 1, "__module__": __name__})
    assert not is_found_by_name(Renamed)
    assert pickle_pair(Renamed()).x == 1


def test_a_shadowed_function_is_not_mistaken():
    namespace = {"__name__": __name__}
    exec("def top_level(x): return 'other'", namespace)
    assert pickle_pair(namespace["top_level"])(1) == "other"


def test_a_module_made_by_hand_goes_by_value(monkeypatch):
    module = types.ModuleType("made_by_hand")
    exec("def answer(): return 42", module.__dict__)
    assert pickle_pair(module.answer)() == 42


def test_modules_registered_by_value(monkeypatch):
    module = types.ModuleType("registered")
    exec("def answer(): return 42", module.__dict__)
    monkeypatch.setitem(sys.modules, "registered", module)
    assert is_found_by_name(module.answer)
    cloudpickle.register_pickle_by_value(module)
    try:
        assert not is_found_by_name(module.answer)
        assert pickle_pair(module.answer) is not module.answer
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def main(monkeypatch):
    """A `__main__` of its own, with one function."""
    module = types.ModuleType("__main__")
    exec("def named(): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_functions_of_a_script_go_by_name(main):
    main.__file__ = "program.py"
    assert pickle_pair(main.named) is main.named


def test_functions_of_a_forked_one_liner_go_by_name(main):
    assert pickle_pair(main.named) is main.named


def test_functions_of_a_notebook_go_by_value(main, monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    body, _ = dumps([main.named])
    del main.named
    assert loads(body, [])[0]() == 1


def test_local_functions_of_a_script_go_by_value(main):
    main.__file__ = "program.py"
    exec("def outer():\n  def inner(): return named()\n  return inner", main.__dict__)
    inner = pickle_pair(main.outer())
    assert inner() == 1
    assert inner.__globals__["named"] is main.named


def test_a_cached_function_arrives_with_an_empty_cache():
    cached = functools.lru_cache(maxsize=3, typed=True)(lambda x: x + 1)
    cached(1)
    again = pickle_pair(cached)
    assert again.cache_parameters() == {"maxsize": 3, "typed": True}
    assert again.cache_info().currsize == 0
    assert again(1) == again(1) == 2
    assert again.cache_info().hits == 1
    assert pickle_pair(by_name) is by_name


@functools.lru_cache
def by_name(x):
    return x


def test_a_compiled_function_arrives_as_the_function():
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert pickle_pair(compiled)(1) == 2
    assert not hasattr(pickle_pair(compiled), "_torchdynamo_orig_callable")

    def around(x):
        return 10 * x

    around._torchdynamo_orig_callable = compiled._torchdynamo_orig_callable  # as functools.wraps does
    assert pickle_pair(around)(1) == 10
