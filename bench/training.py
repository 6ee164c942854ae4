"""Models, training steps and remote parts for the rows of distributed autograd."""

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.competitors.base import Client
from bench.competitors.torch_api import name_of

SERVER = name_of(1)

INPLACE = "modified by an inplace operation"  # torch's error if another trainer's step came between


class Clock:
    """Stopwatch for code run inside it; `seconds` is the sum."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


Step = Callable[[Clock], object]  # runs the timed part inside the clock


class Framework:
    """Modules of telegrad or torch.distributed, under the names that both have."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.rpc: Any = importlib.import_module(f"{package}.rpc")
        self.autograd: Any = importlib.import_module(f"{package}.autograd")

    @property
    def optim(self) -> ModuleType:
        return importlib.import_module(f"{self.package}.optim")

    @contextmanager
    def one_pass(self, clock: Clock) -> Iterator[int]:
        """Open a context; its beginning and end are timed."""
        with clock:
            context = self.autograd.context()
            number = context.__enter__()
        try:
            yield number
        finally:
            with clock:
                context.__exit__(None, None, None)


def as_is(x: Tensor) -> Tensor:
    return x


def chain(package: str, ranks: list[int], x: Tensor) -> Tensor:
    """Double `x` on this worker, then on each of `ranks` in turn."""
    y = x * 2
    if not ranks:
        return y
    result: Tensor = Framework(package).rpc.rpc_sync(name_of(ranks[0]), chain, args=(package, ranks[1:], y))
    return result


class ConvNet(nn.Module):
    """Network of PyTorch's parameter-server tutorial, for images of 28x28.

    Its second dropout acts on vectors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv2(F.relu(self.conv1(x))), 2)
        x = self.dropout1(x).flatten(1)
        x = self.fc2(self.dropout2(F.relu(self.fc1(x))))
        return F.log_softmax(x, dim=1)


class Server:
    """A model that lives on a worker."""

    def __init__(self, package: str, make: Callable[[], nn.Module]) -> None:
        self._rpc = Framework(package).rpc
        torch.manual_seed(0)
        self._model = make()

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self._model(*inputs)
        return result

    def parameters(self) -> list[Any]:
        return [self._rpc.RRef(parameter) for parameter in self._model.parameters()]


def images(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch, 1, 28, 28, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def remote_step(framework: Framework, server: Any, batch: int) -> Step:
    """Return a training step on a server: forward, backward, optimizer."""
    x, labels = images(batch)
    optimizer = framework.optim.DistributedOptimizer(torch.optim.SGD, server.rpc_sync().parameters(), lr=1e-4)

    def step(clock: Clock) -> None:
        with clock, framework.autograd.context() as context:
            loss = F.nll_loss(server.rpc_sync().forward(x), labels)
            framework.autograd.backward(context, [loss])
            optimizer.step(context)

    return step


def local_step(batch: int) -> Step:
    """Return the same step in this process."""
    x, labels = images(batch)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(clock: Clock) -> None:
        with clock:
            optimizer.zero_grad()
            F.nll_loss(model(x), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step


def train(package: str, server: Any, batch: int, seconds: float) -> tuple[int, int]:
    """Train against a server for the given time.

    Returns:
        The number of samples in successful steps, and the number of steps overtaken by another trainer's step.
    """
    step = remote_step(Framework(package), server, batch)
    clock, samples, overtaken = Clock(), 0, 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        try:
            step(clock)
            samples += batch
        except RuntimeError as e:
            if INPLACE not in str(e):
                raise
            overtaken += 1
    return samples, overtaken


def train_together(client: Client, batch: int, warm_up: float, seconds: float) -> tuple[int, int]:
    """Train on all workers but the server (worker 1); return the sums of `train`."""
    framework = Framework(client.rpc_parent)
    rpc, package = framework.rpc, framework.package
    server = rpc.remote(SERVER, Server, args=(package, ConvNet))
    for time_to_run in (warm_up, seconds):
        others = [
            rpc.rpc_async(name_of(rank), train, args=(package, server, batch, time_to_run))
            for rank in range(2, client.workers)
        ]
        done = [train(package, server, batch, time_to_run), *(other.wait() for other in others)]
    return sum(samples for samples, _ in done), sum(overtaken for _, overtaken in done)
