"""References and graphs print as with torch's own RPC."""

import importlib
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad.testing import processes

PACKAGES = ("torch.distributed", "telegrad.compat")
WORKERS = 3


def echo(value: Any) -> Any:
    return value


def shown(*values: Any) -> list[str]:
    return [str(value) for value in values]


def own(package: str) -> Any:
    return importlib.import_module(f"{package}.rpc").RRef(5)


def ask_another(package: str, to: str) -> Any:
    return importlib.import_module(f"{package}.rpc").remote(to, echo, (1,))


def join(package: str, rank: int, n: int, init_method: str) -> Any:
    rpc: Any = importlib.import_module(f"{package}.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    backend = rpc.backend_registry.BackendType.TENSORPIPE  # rpc.BackendType is an old one if torch's _testing is loaded
    rpc.init_rpc(f"w{rank}", backend, rank, n, options)
    return rpc


def print_references(rank: int, n: int, init_method: str, package: str) -> list[Any]:
    if package == "telegrad.compat":  # a drop-in's references print as torch's do
        sys.modules["torch.distributed.rpc"] = importlib.import_module("telegrad.compat.rpc")
    rpc = join(package, rank, n, init_method)
    printed: list[Any] = []
    if rank == 0:
        first = rpc.RRef(1)
        there = rpc.remote("w1", echo, (1,))
        here = rpc.remote("w0", echo, (1,))
        builtin = rpc.remote("w2", torch.add, (torch.ones(1), 1), timeout=20)
        printed += shown(first, there, here, builtin)
        for value in (there.to_here(), here.to_here(), builtin.to_here(), rpc.rpc_sync("w1", echo, (2,))):
            printed.append(str(value))  # calls take no number
        printed += rpc.rpc_sync("w1", shown, (there,))  # a fork takes one, for any receiver
        printed += rpc.rpc_sync("w2", shown, (there,))
        printed += rpc.rpc_sync("w2", shown, (first, there))
        printed += rpc.rpc_sync("w2", shown, (there, [there]))  # one fork
        printed += rpc.rpc_sync("w0", shown, (there, first))
        printed += shown(rpc.RRef(2), rpc.remote("w1", echo, (torch.ones(1),)))
        printed += shown(*(rpc.rpc_sync("w1", own, (package,)) for _ in range(2)))
        chained = rpc.rpc_sync("w1", ask_another, (package, "w2"))
        printed += [*shown(chained), chained.to_here(), *shown(rpc.RRef(3))]
        with pytest.raises(RuntimeError, match="localValue") as refused:
            there.local_value()
        printed.append(str(refused.value).splitlines()[0])
    rpc.shutdown()
    return printed


def print_graph(rank: int, n: int, init_method: str, package: str) -> list[Any]:
    rpc = join(package, rank, n, init_method)
    autograd: Any = importlib.import_module(f"{package}.autograd")
    printed: list[Any] = []
    if rank == 0:
        with autograd.context() as context:
            sum: Tensor = rpc.rpc_sync("w1", torch.add, (torch.ones(1, requires_grad=True), 1))
            node: Any = sum.grad_fn
            printed = [node.name(), (sum * 2).grad_fn.next_functions[0][0].name()]  # type: ignore[union-attr]
            recorded = autograd._retrieve_context(context)
            printed += [f.name() for f in recorded._recv_functions().values()]
            printed += [[f.name() for f, _ in s.next_functions] for s in recorded._send_functions().values()]
    rpc.shutdown()
    return printed


may_go_on = threading.Event()
ended: "queue.SimpleQueue[bool]" = queue.SimpleQueue()


def call_late(package: str) -> None:
    """Call after the timeout of the caller."""
    assert may_go_on.wait(30)
    ended.put(importlib.import_module(f"{package}.rpc").rpc_sync("w0", echo, (True,)))


def go_on() -> list[bool]:
    may_go_on.set()
    return [ended.get(timeout=30) for _ in range(2)]


def modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def run_without_caller(rank: int, n: int, init_method: str, package: str) -> list[Any]:
    """Return what functions see of their caller's deadline and torch state."""
    if package == "telegrad.compat":
        sys.modules["torch.distributed.rpc"] = importlib.import_module("telegrad.compat.rpc")
    rpc = join(package, rank, n, init_method)
    found: list[Any] = []
    if rank == 0:
        created = rpc.remote("w1", call_late, (package,), timeout=0.1)
        with pytest.raises(RuntimeError, match="set timeout"):
            rpc.rpc_sync("w1", call_late, (package,), timeout=0.1)
        found += rpc.rpc_sync("w1", go_on)
        del created
        for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)):
            with mode():
                found += [rpc.rpc_sync("w1", modes), rpc.remote("w1", modes).to_here()]
    rpc.shutdown()
    return found


def raise_errors(rank: int, n: int, init_method: str, package: str) -> list[list[str]]:
    """Return the classes of Python of each error."""
    found = []

    def note(use: Callable[[], object]) -> None:
        with pytest.raises(Exception) as raised:
            use()
        found.append([kind.__name__ for kind in (RuntimeError, TypeError, ValueError) if raised.errisinstance(kind)])

    rpc: Any = importlib.import_module(f"{package}.rpc")
    for name in (None, 3):
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"{init_method}{name}")
        note(lambda: rpc.init_rpc(name, rank=rank, world_size=n, rpc_backend_options=options))  # noqa: B023
    join(package, rank, n, init_method)
    for worker in (1.5, []):
        note(lambda: rpc.get_worker_info(worker))  # noqa: B023
        note(lambda: rpc.api._get_current_rpc_agent().get_worker_info(worker))  # noqa: B023
    note(lambda: rpc.rpc_sync(1.5, echo, (1,)))
    rpc.shutdown()
    return found


def test_functions_do_not_inherit_deadline_and_torch_state() -> None:
    torchs, ours = (processes(2, run_without_caller, package, method="fork")[0] for package in PACKAGES)
    assert torchs == [True, True, *[(True, False, False)] * 6]
    assert ours == torchs


def test_wrong_names_raise_errors_of_the_same_classes() -> None:
    torchs, ours = (processes(1, raise_errors, package, method="fork")[0] for package in PACKAGES)
    assert torchs[:3] == [["RuntimeError"], ["RuntimeError"], ["TypeError"]]
    assert len(ours) == len(torchs)
    for mine, theirs in zip(ours, torchs, strict=True):
        assert set(theirs) <= set(mine)


def test_references_and_forks_have_the_same_numbers() -> None:
    torchs, ours = (processes(WORKERS, print_references, package, method="fork") for package in PACKAGES)
    assert torchs[0][0] == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    assert ours[0] == torchs[0]


def test_nodes_have_the_same_names() -> None:
    torchs, ours = (processes(2, print_graph, package, method="fork")[0] for package in PACKAGES)
    assert torchs[0] == "torch::distributed::autograd::RecvRpcBackward"
    assert ours == torchs


def test_viewers_show_the_same_name() -> None:
    """Graph viewers print the name of a node's type, Python prints its qualified name."""
    importlib.import_module("telegrad.compat.autograd")
    from telegrad.autograd.recording import record_received

    (tensor,) = record_received(1, 1, [torch.ones(1)])[1]
    assert type(tensor.grad_fn).__name__ == "torch::distributed::autograd::RecvRpcBackward"
    assert repr(tensor.grad_fn).startswith("<torch.distributed.autograd.RecvRpcBackward object")
