"""Generated models with random placement compute the results of one process."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradcheck_models import (
    CALLS,
    WIDTH,
    Add,
    Checkpointed,
    InPlace,
    Mix,
    Residual,
    Scale,
    Surrounding,
    UnusedResult,
    Views,
    integers,
    wait,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.errors import UnknownWorker
from telegrad.testing import Cluster, GradcheckError, cluster, gradcheck, run_all

WORKERS = ("w1", "w2", "w3")


@pytest.fixture(scope="module")
def group() -> Any:
    """Start a caller and three workers."""
    with cluster(4) as c:
        yield c


def models(depth: int) -> st.SearchStrategy[nn.Module]:
    seeds = st.integers(0, 99)
    simple = st.one_of(seeds.map(Scale), seeds.map(Mix))
    if depth == 0:
        return simple
    inner = models(depth - 1)
    return st.one_of(
        simple,
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: nn.Sequential(*parts)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Add(*parts)),
        st.builds(Residual, inner),
        st.builds(Surrounding, simple, inner),
        st.builds(UnusedResult, inner, inner),
        st.builds(InPlace, inner),
        st.builds(Views, inner),
        st.builds(Checkpointed, inner),
    )


def placements(model: nn.Module) -> st.SearchStrategy[dict[str, str]]:
    paths = [name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)]
    chosen = st.lists(st.sampled_from(paths), min_size=1, max_size=6, unique=True)
    return chosen.flatmap(lambda ps: st.fixed_dictionaries({p: st.sampled_from((*WORKERS, "w0")) for p in ps}))


def check_some(data: st.DataObject) -> None:
    model = data.draw(models(3))
    placement = data.draw(placements(model))
    call = data.draw(st.sampled_from(CALLS))
    x = integers(4, WIDTH, seed=1).requires_grad_(data.draw(st.booleans()))
    assert gradcheck(model, placement, [x], call=call, exact=True, plain=data.draw(st.booleans()))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_generated_models(group: Cluster, data: st.DataObject) -> None:
    check_some(data)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_generated_models(group: Cluster, data: st.DataObject) -> None:
    check_some(data)


def deep(n: int) -> tuple[nn.Module, dict[str, str]]:
    """Return `n` nested calls, back and forth between two workers."""
    model: nn.Module = Mix(0)
    for i in range(n):
        model = Residual(nn.Sequential(Scale(i), model))
    paths = [name for name, module in model.named_modules() if isinstance(module, nn.Sequential)]
    return model, {path: WORKERS[i % 2] for i, path in enumerate(paths)}


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, str]]]] = {
    "a chain": lambda: (nn.Sequential(Mix(1), Mix(2), Mix(3), Scale(4)), {"0": "w1", "1": "w2", "2": "w3", "3": "w1"}),
    "a diamond": lambda: (Add(Mix(1), Mix(2)), {"parts.0": "w1", "parts.1": "w2"}),
    "one activation to several": lambda: (Add(*map(Mix, range(3))), {f"parts.{i}": WORKERS[i] for i in range(3)}),
    "never used": lambda: (UnusedResult(Mix(1), Mix(2)), {"unused": "w1", "part": "w2"}),
    "nested three deep": lambda: deep(3),
    "nested seven deep": lambda: deep(7),
    "a cell around a call": lambda: (Surrounding(Mix(1), Mix(2)), {"part": "w1"}),
    "a remote cell around a remote call": lambda: (Surrounding(Mix(1), Mix(2)), {"cell": "w1", "part": "w2"}),
    "a residual": lambda: (Residual(Mix(1)), {"part": "w1"}),
    "in place": lambda: (InPlace(Mix(1)), {"part": "w1"}),
    "views": lambda: (Views(InPlace(Mix(1))), {"part": "w2", "part.part": "w1"}),
    "checkpointed calls": lambda: (Checkpointed(nn.Sequential(Mix(1), Mix(2))), {"part.0": "w1"}),
    "a checkpointed part": lambda: (Residual(Checkpointed(Mix(1))), {"part": "w1"}),
    "the whole model": lambda: (Surrounding(Mix(1), Scale(2)), {"": "w1", "part": "w2"}),
    "the caller itself": lambda: (nn.Sequential(Mix(1), Scale(2)), {"0": "w0", "1": "w1"}),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", CASES)
def test_a_placement(group: Cluster, case: str, call: Any, plain: bool) -> None:
    model, placement = CASES[case]()
    assert gradcheck(model, placement, [integers(4, WIDTH).requires_grad_()], call=call, exact=True, plain=plain)


def tied() -> nn.Module:
    first, second = Mix(1), Mix(2)
    second.weight = first.weight
    return nn.Sequential(first, Scale(3), second)


@pytest.mark.parametrize("placement", [{"1": "w1"}, {"0": "w1"}, {"0": "w1", "2": "w2"}, {"": "w1", "1": "w2"}])
def test_tied_weights(group: Cluster, placement: dict[str, str]) -> None:
    for plain in (False, True):
        assert gradcheck(tied(), placement, [integers(4, WIDTH)], plain=plain)


def test_a_part_that_occurs_twice_is_always_called_remotely(group: Cluster) -> None:
    part, calls = Mix(1), []

    def call(*part_and_arguments: Any) -> Any:
        calls.append(1)
        return wait(*part_and_arguments)

    assert gradcheck(nn.Sequential(part, Scale(3), part), {"0": "w1"}, [integers(4, WIDTH)], call=call)
    assert len(calls) == 4  # of two runs


def test_an_ordinary_model_is_compared_as_closely_as_its_dtype_allows(group: Cluster) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10), nn.LogSoftmax(1))
    assert gradcheck(model, {"0": "w1", "3": "w2"}, [torch.randn(2, 1, 8, 8)])


def test_sparse_gradients(group: Cluster) -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, WIDTH, sparse=True, mode="sum", dtype=torch.float64), Mix(1))
    model[0].weight.data = integers(10, WIDTH)
    assert gradcheck(model, {"0": "w1"}, [torch.tensor([[1, 2], [2, 2], [0, 9]])])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(integers(WIDTH), integers(WIDTH, seed=1)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_complex_gradients(group: Cluster) -> None:
    assert gradcheck(
        nn.Sequential(Complex(), Complex()), {"1": "w1"}, [integers(2, WIDTH).requires_grad_()], exact=True
    )


def test_it_starts_a_group_if_there_is_none() -> None:
    model = nn.Sequential(Mix(1), Mix(2))
    # In a separate thread: this one may be within another test's group.
    assert run_all([lambda: gradcheck(model, {"0": "alice", "1": "bob"}, [integers(2, WIDTH)])]) == [True]


def test_contexts_at_once(group: Cluster) -> None:
    def one(seed: int) -> None:
        with group[0]:
            for _ in range(5):
                gradcheck(Surrounding(Mix(seed), Mix(2)), {"cell": "w1", "part": "w2"}, [integers(4, WIDTH, seed=seed)])

    run_all([lambda seed=seed: one(seed) for seed in range(4)])  # type: ignore[misc]


# ---- gradcheck


class Wrong(nn.Module):
    """Module with another result outside of the main thread."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(integers(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            return x * self.weight
        if self.how == "output":
            return x * self.weight + 1
        if self.how == "gradient":
            return x * self.weight.detach()
        return x.detach() * self.weight


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("output", "output 0"),
        ("gradient", "gradient of parameter 1.weight"),
        ("input", "gradient of parameter 0.weight"),
    ],
)
def test_a_difference_is_found_and_named(group: Cluster, how: str, what: str) -> None:
    with pytest.raises(GradcheckError, match=what):
        gradcheck(nn.Sequential(Mix(1), Wrong(how)), {"1": "w1"}, [integers(4, WIDTH)])


def random_output(part: Any, args: Any, kwargs: Any) -> Any:
    return wait(part, args, kwargs) + torch.rand(())


def test_nondeterministic_runs_are_found(group: Cluster) -> None:
    with pytest.raises(GradcheckError, match="second distributed run"):
        gradcheck(nn.Sequential(Mix(1), Mix(2)), {"1": "w1"}, [integers(4, WIDTH)], call=random_output)


def test_bad_placements(group: Cluster) -> None:
    with pytest.raises(ValueError, match="no such part"):
        gradcheck(Mix(1), {"nothing": "w1"}, [integers(2, WIDTH)])
    with pytest.raises(UnknownWorker, match="could not find destination"):
        gradcheck(Mix(1), {"": "unknown"}, [integers(2, WIDTH)])
    with pytest.raises(ValueError, match="nothing to compare"):
        gradcheck(nn.ReLU(), {"": "w1"}, [integers(2, WIDTH)])


def test_the_model_is_unchanged(group: Cluster) -> None:
    model = nn.Sequential(Mix(1), Mix(2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = integers(2, WIDTH).requires_grad_()
    gradcheck(model, {"0": "w1"}, [x])
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert rpc.is_available()
    assert autograd.is_available()
