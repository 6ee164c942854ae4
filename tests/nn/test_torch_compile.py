"""Remote calls in compiled code: each is a graph break, and the rest is compiled."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("three")

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rpc_sync": lambda x: rpc.rpc_sync("w1", torch.mul, (x.cos(), 2)).sin(),
    "rpc_async": lambda x: rpc.rpc_async("w1", torch.mul, (x.cos(), 2)).wait().sin(),
    "remote": lambda x: rpc.remote("w1", torch.mul, args=(x.cos(), 2)).to_here().sin(),
    "stream": lambda x: torch.stack(list(rpc.stream("w1", twice, (x.cos(),)))).sum(0).sin(),
}


def twice(x: Tensor) -> Any:
    yield x
    yield x


class Graphs:
    """Backend that counts the graphs it gets and runs them in eager mode."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CALLS)
def test_the_code_around_a_call_is_compiled(name: str) -> None:
    graphs, x = Graphs(), torch.tensor([0.5, 1.0])
    torch.testing.assert_close(torch.compile(CALLS[name], backend=graphs)(x), CALLS[name](x))
    assert graphs.count == 2  # before the call, and after it


METHODS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rpc_sync": lambda rref, x: rref.rpc_sync().forward(x.cos()).sin(),
    "rpc_async": lambda rref, x: rref.rpc_async().forward(x.cos()).wait().sin(),
    "remote": lambda rref, x: rref.remote().forward(x.cos()).to_here().sin(),
}


@pytest.mark.parametrize("kind", METHODS)
def test_methods_of_a_referenced_value(kind: str) -> None:
    rref, x = rpc.remote("w1", nn.Linear, args=(2, 2)), torch.tensor([0.5, 1.0])
    compiled = torch.compile(METHODS[kind], backend="eager")
    torch.testing.assert_close(compiled(rref, x), METHODS[kind](rref, x))
    assert not hasattr(rref.rpc_sync(), "__dict__")


@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: nn.Sequential(m, nn.Linear(2, 1))], ids=["alone", "sequential"]
)
def test_a_remote_module_trains(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, x = wrap(RemoteModule("w1", nn.Linear, (2, 2))), torch.tensor([0.5, 1.0], requires_grad=True)
    compiled = torch.compile(model, backend="eager")
    found = []
    for forward in (model, compiled):
        with autograd.context() as context:
            autograd.backward(context, [forward(x).sum()])
            found.append(autograd.get_gradients(context))
    assert x in found[0]
    assert found[0].keys() == found[1].keys()
    for leaf, gradient in found[0].items():
        torch.testing.assert_close(found[1][leaf], gradient)


def test_a_compiled_step_with_a_context() -> None:
    layer = nn.Linear(2, 1)

    def step(x: Tensor) -> Tensor:
        with autograd.context() as context:
            autograd.backward(context, [layer(rpc.rpc_sync("w1", torch.mul, (x.cos(), 2))).sum()])
            return autograd.get_gradients(context)[layer.weight]

    x = torch.tensor([0.5, 1.0])
    torch.testing.assert_close(torch.compile(step, backend="eager")(x), step(x))


class CallsOn(nn.Module):
    """Sends the output of its layer to another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = rpc.rpc_sync("w2", torch.mul, (self.layer(x), 2))
        return found.sin()


def test_a_remote_module_that_is_compiled_and_calls_on() -> None:
    module, x = RemoteModule("w1", CallsOn), torch.tensor([0.5, 1.0])
    expected = module(x)
    module.compile(backend="eager")
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("first", ["telegrad", "dynamo"])
def test_dynamo_is_not_imported_before_its_use(first: str) -> None:
    program = """
import sys
if sys.argv[1] == "dynamo":
    import torch._dynamo
finders = list(sys.meta_path)
import telegrad.nn, telegrad.rpc
assert ("torch._dynamo" in sys.modules) == (sys.argv[1] == "dynamo")
from torch._dynamo import trace_rules
assert sys.meta_path == finders
assert trace_rules.check_file(telegrad.rpc.__file__).skipped
assert not trace_rules.check_file("/a/program.py").skipped
assert trace_rules.__spec__.loader is trace_rules.__loader__
assert trace_rules.__loader__.get_source(trace_rules.__name__)
"""
    subprocess.run([sys.executable, "-c", program, first], check=True, timeout=120)
