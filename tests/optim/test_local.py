"""A worker's part of a distributed optimizer: parameters and memory of a step."""

import threading
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn, optim

from telegrad.autograd.consistency.saved_tensors import protect
from telegrad.optim.local import LocalOptimizer
from telegrad.testing import Gate, run_all


class OneWorker:
    """The interface of a worker that a local optimizer uses."""

    def __init__(self) -> None:
        self.attachments: dict[str, Any] = {}


class Plain(optim.Optimizer):
    """Plain gradient descent, in a class that is not torch's."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for shadow in group["params"]:
                if shadow.grad is not None:
                    shadow.add_(shadow.grad, alpha=-group["lr"])


class Failing(optim.SGD):
    """Optimizer that steps its first parameter, and then fails."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0].zero_()
        raise ValueError("half-way")


@pytest.fixture
def worker() -> OneWorker:
    return OneWorker()


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2, 2, 2))]


def local(worker: OneWorker, parameters: list[Any], cls: Any = optim.SGD, **kwargs: Any) -> LocalOptimizer:
    return LocalOptimizer(worker, cls, [({}, parameters, None)], False, (), kwargs)


def ones(parameters: list[Any]) -> dict[Tensor, Tensor]:
    return {parameter: torch.ones_like(parameter) for parameter in parameters}


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (optim.Adam, {"lr": 0.1, "fused": True}),
    (optim.AdamW, {"lr": 0.1}),
    (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.Adamax, {"lr": 0.1}),
    (optim.ASGD, {"lr": 0.1}),
    (optim.NAdam, {"lr": 0.1}),
    (optim.RAdam, {"lr": 0.1}),
    (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    (optim.Rprop, {"lr": 0.1}),
    (optim.Adafactor, {"lr": 0.1}),
    (Plain, {"lr": 0.25}),
]


@pytest.mark.parametrize(("cls", "kwargs"), CLASSES, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v))
@pytest.mark.parametrize("in_use", [False, True])
def test_steps_are_those_of_the_optimizer(
    worker: OneWorker, parameters: list[nn.Parameter], cls: Any, kwargs: dict[str, Any], in_use: bool
) -> None:
    expected = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    reference = cls(expected, **kwargs)
    mine = local(worker, parameters, cls, **kwargs)
    generator = torch.Generator().manual_seed(1)
    for round_ in range(5):
        held = [parameter.detach() for parameter in parameters] if in_use and round_ % 2 else []
        gradients = {p: torch.randn(p.shape, generator=generator) for p in parameters[: 2 + round_ % 2]}
        for parameter, one in zip(parameters, expected, strict=True):
            one.grad = gradients[parameter].clone() if parameter in gradients else None
        reference.step()
        mine.step(1, gradients)
        del held
    for parameter, one in zip(parameters, expected, strict=True):
        assert torch.equal(parameter, one)
        assert parameter.grad is None


def test_all_supported_optimizers_of_torch_are_tested() -> None:
    tried = {cls for cls, _ in CLASSES}
    other = {"Optimizer", "SparseAdam", "LBFGS", "Muon"}  # the base, one for sparse gradients, two of special needs
    every = {cls for cls in vars(optim).values() if isinstance(cls, type) and issubclass(cls, optim.Optimizer)}
    assert {cls.__name__ for cls in every - tried} <= other


def test_sparse_gradients(worker: OneWorker) -> None:
    table, expected = nn.Parameter(torch.ones(10, 2)), nn.Parameter(torch.ones(10, 2))
    expected.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 7]]), torch.ones(3, 2), (10, 2))
    mine = local(worker, [table], optim.SparseAdam, lr=0.1)
    reference = optim.SparseAdam([expected], lr=0.1)
    place = table.data_ptr()
    for _ in range(3):
        mine.step(1, {table: expected.grad})
        reference.step()
    assert torch.equal(table, expected)
    assert table.data_ptr() == place


def test_groups_and_names(worker: OneWorker, parameters: list[nn.Parameter]) -> None:
    a, b, c = parameters
    groups: Any = [({"lr": 1.0}, [a], ["a"]), ({}, [b, c], ["b", "c"])]
    mine = LocalOptimizer(worker, optim.SGD, groups, True, (), {"lr": 0.5})
    assert [group["param_names"] for group in mine.optimizer.param_groups] == [["a"], ["b", "c"]]
    before = [parameter.detach().clone() for parameter in parameters]
    mine.step(1, ones(parameters))
    for parameter, old, lr in zip(parameters, before, (1.0, 0.5, 0.5), strict=True):
        assert torch.equal(parameter, old - lr)


def test_an_unused_parameter_is_stepped_in_place(worker: OneWorker, parameters: list[nn.Parameter]) -> None:
    mine = local(worker, parameters, lr=0.1)
    places = [parameter.data_ptr() for parameter in parameters]
    for _ in range(3):
        mine.step(1, ones(parameters))
    assert [parameter.data_ptr() for parameter in parameters] == places


def test_values_saved_by_a_graph_are_unchanged(worker: OneWorker, parameters: list[nn.Parameter]) -> None:
    mine = local(worker, parameters, lr=0.1)
    a, b, c = parameters
    places = [parameter.data_ptr() for parameter in parameters]
    before = b.detach().clone()
    with protect(worker).handler_guard(1):
        y = (b * b).sum()
    for _ in range(3):
        mine.step(2, ones(parameters))
    assert torch.equal(torch.autograd.grad(y, [b])[0], 2 * before)
    assert torch.equal(b, before - 0.1 - 0.1 - 0.1)
    assert (a.data_ptr(), c.data_ptr()) == (places[0], places[2])
    assert b.data_ptr() != places[1]


def test_memory_alternates(worker: OneWorker) -> None:
    """With one forward pass in flight at each step, two pieces of memory are enough."""
    parameter = nn.Parameter(torch.zeros(100))
    mine = local(worker, [parameter], lr=1.0)
    places = set()
    graph = None
    for _ in range(6):
        with protect(worker).handler_guard(1):
            graph = (parameter * parameter).sum()
        mine.step(2, ones([parameter]))
        places.add(parameter.data_ptr())
        del graph
    assert len(places) == 2
    assert torch.equal(parameter, torch.full((100,), -6.0))


def test_values_in_a_message_are_unchanged(worker: OneWorker) -> None:
    """Messages hold the storage's Python object, of which there is only one."""
    parameter = nn.Parameter(torch.zeros(100))
    mine = local(worker, [parameter], lr=1.0)
    carried = []
    for step in range(3):
        storage = parameter.untyped_storage()
        carried.append((storage, torch.empty(0).set_(storage)[0].item()))  # type: ignore[call-overload]
        assert carried[-1][1] == -step
        mine.step(1, ones([parameter]))
        assert [torch.empty(0).set_(storage)[0].item() for storage, _ in carried] == [v for _, v in carried]  # type: ignore[call-overload]
    assert torch.equal(parameter, torch.full((100,), -3.0))


def test_open_context_bodies_prevent_in_place_steps(worker: OneWorker) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    mine = local(worker, [parameter], lr=1.0)
    place = parameter.data_ptr()
    with protect(worker).context_guard(5):
        mine.step(5, ones([parameter]))
        assert parameter.data_ptr() == place
        mine.step(6, ones([parameter]))
        assert parameter.data_ptr() != place


def test_shared_memory_is_stepped_in_place(worker: OneWorker) -> None:
    for cls in (optim.SGD, Plain):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.share_memory_()
        mine = local(worker, [parameter], cls, lr=1.0)
        place = parameter.data_ptr()
        with protect(worker).handler_guard(1):
            y = (parameter * parameter + parameter).sum()
        mine.step(2, ones([parameter]))
        assert parameter.data_ptr() == place
        assert torch.equal(parameter, -torch.ones(2))
        assert torch.equal(torch.autograd.grad(y, [parameter])[0], torch.ones(2))


def test_a_failed_step_changes_no_copied_parameter(worker: OneWorker, parameters: list[nn.Parameter]) -> None:
    before = [parameter.detach().clone() for parameter in parameters]
    mine = local(worker, parameters, Failing, lr=1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="half-way"):
            mine.step(1, ones(parameters))
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    local(worker, parameters, lr=1.0).step(1, ones(parameters))  # and nothing is left held
    assert torch.equal(parameters[0], before[0] - 1)


def test_other_optimizers_compute_before_the_gate(worker: OneWorker) -> None:
    opened = Gate()

    class Slow(Plain):
        def step(self, closure: Any = None) -> None:
            opened.enter()
            super().step()

    parameter = nn.Parameter(torch.zeros(2))
    mine = local(worker, [parameter], Slow, lr=1.0)
    thread = threading.Thread(target=mine.step, args=(1, ones([parameter])), daemon=True)
    thread.start()
    opened.wait_for()
    with protect(worker).handler_guard(2):  # it does not wait for user code
        assert torch.equal(parameter, torch.zeros(2))
    opened.open()
    thread.join(10)
    assert torch.equal(parameter, -torch.ones(2))


def test_optimizers_of_the_same_parameters_step_exclusively(worker: OneWorker) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    both = [local(worker, [parameter], cls, lr=1.0) for cls in (optim.SGD, Plain)]

    def run(mine: LocalOptimizer, context: int) -> None:
        for _ in range(100):
            with protect(worker).handler_guard(context):
                graph = parameter * parameter
            mine.step(context, ones([parameter]))
            del graph

    run_all([lambda i=i: run(both[i % 2], i) for i in range(4)])  # type: ignore[misc]
    assert torch.equal(parameter, torch.full((3,), -400.0))


class Interrupting:
    """Lock during whose wait Ctrl+C is pressed."""

    def acquire(self, timeout: float) -> bool:
        raise KeyboardInterrupt


def test_an_interrupted_wait_for_another_step_holds_no_lock(worker: OneWorker, parameters: list[nn.Parameter]) -> None:
    one = local(worker, parameters)
    *first, last = one._in_turn
    lock, last.lock = last.lock, cast("Any", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        one.step(1, ones(parameters))
    last.lock = lock
    free: list[bool] = []
    other = threading.Thread(target=lambda: free.extend(each.lock.acquire(blocking=False) for each in first))
    other.start()
    other.join()
    assert free == [True, True]


def test_a_step_that_waits_too_long_logs_it(worker: OneWorker) -> None:
    opened = Gate()

    class Slow(Plain):
        def step(self, closure: Any = None) -> None:
            opened.enter()

    parameter = nn.Parameter(torch.zeros(3))
    slow, quick = local(worker, [parameter], Slow), local(worker, [parameter], lr=1.0)
    thread = threading.Thread(target=slow.step, args=(1, ones([parameter])), daemon=True)
    thread.start()
    opened.wait_for()
    with pytest.raises(TimeoutError, match=r"still stepping a parameter of shape \[3\] after 0\.05 s"):
        quick.step(2, ones([parameter]), 0.05)
    opened.open()
    thread.join(10)
    quick.step(2, ones([parameter]), 10.0)
    assert torch.equal(parameter, -torch.ones(3))


def test_invalid_parameters(worker: OneWorker) -> None:
    leaf = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        local(worker, [leaf * 2], lr=1.0)
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        local(worker, [1.0], lr=1.0)
    with pytest.raises(ValueError, match="share memory"):
        local(worker, [leaf, nn.Parameter(leaf.data[1:])], lr=1.0)
    whole = torch.zeros(4)
    halves = [nn.Parameter(whole[:2]), nn.Parameter(whole[2:])]  # of one storage, but side by side
    local(worker, halves, lr=1.0).step(1, ones(halves))
    assert torch.equal(halves[1], -torch.ones(2))


class FailsToAdd(Plain):
    """Optimizer that fails after it has added a second group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if len(self.param_groups) > 1:
            raise ValueError("too late")


def test_a_group_that_cannot_be_added_is_removed(worker: OneWorker, parameters: list[nn.Parameter]) -> None:
    mine = local(worker, parameters[:1], FailsToAdd)
    for _ in range(2):
        with pytest.raises(ValueError, match="too late"):
            mine.add_group(({}, parameters[1:], None))
    assert len(mine.optimizer.param_groups) == 1
    assert mine.parameters == parameters[:1]
    before = parameters[1].detach().clone()
    mine.step(1, ones(parameters))
    assert torch.equal(parameters[1], before)


def test_a_group_is_removed_whenever_its_attempt_arrives(worker: OneWorker, parameters: list[nn.Parameter]) -> None:
    mine = local(worker, parameters[:1], optim.Adam, lr=0.1)
    for early in (True, False):
        if early:
            mine.undo_add("a")
            with pytest.raises(RuntimeError, match="has failed on another worker, and was undone"):
                mine.add_group(({"lr": 5.0}, parameters[1:], None), "a")
        else:
            mine.add_group(({"lr": 5.0}, parameters[1:], None), "a")
            mine.step(1, ones(parameters))
            assert len(mine.optimizer.state) == 3
            mine.undo_add("a")
            mine.undo_add("a")
        assert [group["lr"] for group in mine.optimizer.param_groups] == [0.1]
        assert len(mine.optimizer.state) == (0 if early else 1)
        before = parameters[1].detach().clone()
        mine.step(1, ones(parameters))
        assert torch.equal(parameters[1], before)
        mine.optimizer.state.clear()
    mine.add_group(({"lr": 5.0}, parameters[1:], None), "b")
    mine.undo_add("a")  # another attempt's group stays
    assert [group["lr"] for group in mine.optimizer.param_groups] == [0.1, 5.0]


def test_attributes_of_parameters_can_be_read(worker: OneWorker) -> None:
    seen = []

    class Reading(Plain):
        def step(self, closure: Any = None) -> None:
            seen.extend(shadow.note for group in self.param_groups for shadow in group["params"])

    parameter = nn.Parameter(torch.zeros(1))
    parameter.note = "no decay"  # type: ignore[attr-defined]
    local(worker, [parameter], Reading).step(1, {})
    assert seen == ["no decay"]


def test_a_step_under_inference_mode_leaves_ordinary_parameters(worker: OneWorker) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    mine = local(worker, [parameter], lr=1.0)
    gradients = ones([parameter])
    view = parameter.detach()
    with torch.inference_mode():
        mine.step(1, gradients)
    assert not parameter.is_inference()
    assert not parameter.data.is_inference()
    (parameter * parameter).sum().backward()
    del view


def test_without_reference_counts_everything_is_copied(
    worker: OneWorker, parameters: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.optim.parameters._count_uses", None)
    mine = local(worker, parameters, lr=1.0)
    place, before = parameters[0].data_ptr(), parameters[0].detach().clone()
    mine.step(1, ones(parameters))
    assert parameters[0].data_ptr() != place
    assert torch.equal(parameters[0], before - 1)
