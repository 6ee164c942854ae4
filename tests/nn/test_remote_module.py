"""Remote modules, used like local ones."""

import asyncio
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_helpers import Net, NoModule, failing, is_reset_and_frozen, noting, pass_back, use
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule, owner
from telegrad.rpc import RRef
from telegrad.testing import Cluster, assert_quiescent, run_all

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def net(three: Cluster) -> RemoteModule:
    return RemoteModule("w1/cpu", Net, (4,), {"outputs": 2})


def here() -> Net:
    return Net(4, outputs=2)


# ---- where it is


@pytest.mark.parametrize(
    ("text", "on"), [("w1/cpu", "w1"), ("w2", "w2"), ("rank:1/cpu", 1), ("rank:2", 2), ("cpu", "w0")]
)
@pytest.mark.usefixtures("three")
def test_places(text: str, on: str | int) -> None:
    module = RemoteModule(text, nn.Linear, (4, 1))
    assert module.on == on
    assert module.device == "cpu"
    assert module.get_module_rref().owner() == rpc.get_worker_info(on)
    assert module(X).shape == (3, 1)


@pytest.mark.usefixtures("three")
def test_unknown_places() -> None:
    with pytest.raises(RuntimeError, match="could not find destination name unknown"):
        RemoteModule("unknown/cpu", nn.Linear, (4, 1))
    with pytest.raises(ValueError, match="Could not parse remote_device: w1/cpu/1"):
        RemoteModule("w1/cpu/1", nn.Linear, (4, 1))


def test_without_a_group() -> None:
    def make() -> None:
        RemoteModule("w1/cpu", nn.Linear, (4, 1))

    with pytest.raises(AssertionError, match=r"RemoteModule only works in RPC\."):
        run_all([make])  # a new thread has no current worker


def test_a_deleted_module_leaks_nothing(three: Cluster) -> None:
    module = RemoteModule("w1/cpu", Net, (4,))
    module(X)
    module.load_state_dict(module.state_dict())
    layer = module.get_submodule("first")
    assert layer.in_features == 4
    assert rpc.rpc_sync("w2", use, (module, X))[2] == "w1"
    del module, layer
    for worker in three:
        assert_quiescent(worker)


def test_repr(net: RemoteModule) -> None:
    assert repr(net).startswith("RemoteModule(on='w1', device='cpu', module=<RRef to a value on w1, id ")


@pytest.mark.usefixtures("three")
def test_a_failed_creation_raises_at_first_use() -> None:
    bad = RemoteModule("w1", NoModule, (1,))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn"
        ):
            bad.forward()
    with pytest.raises(ValueError, match="cannot be made"):
        RemoteModule("w1", failing)(X)


# ---- running it


def test_results_equal_a_local_module(net: RemoteModule) -> None:
    assert torch.equal(net(X), here()(X))
    assert torch.equal(net.forward(X, scale=2.0), here()(X, scale=2.0))
    assert torch.equal(net.forward_async(X, 3.0).wait(), here()(X, 3.0))


def test_any_method(net: RemoteModule) -> None:
    assert torch.equal(net.encode(X, bias=2.0), X.sum(1) + 2)
    assert torch.equal(net.encode.rpc_async(X).wait(), X.sum(1))
    assert torch.equal(asyncio.run(net.encode.call(X)), X.sum(1))
    reference = net.encode.remote(X)
    assert reference.owner_name() == "w1"
    assert torch.equal(reference.to_here(), X.sum(1))
    with pytest.raises(KeyError, match="no such thing"):
        net.fail()
    del reference


def test_attributes(net: RemoteModule) -> None:
    assert net.inputs == 4
    assert hasattr(net, "encode")
    assert not hasattr(net, "nothing")
    with pytest.raises(AttributeError, match="neither 'RemoteModule' nor the remote 'Net' has an attribute 'nothing'"):
        net.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'broken'"):
        net.broken  # noqa: B018
    with pytest.raises(AttributeError, match="'first' is a submodule of the remote module"):
        net.first  # noqa: B018
    layer = net.get_submodule("first")
    with pytest.raises(AttributeError, match="'weight' is a parameter or buffer of the remote module"):
        layer.weight  # noqa: B018
    del layer


def test_local_hooks_run_around_the_call(net: RemoteModule) -> None:
    seen: list[Any] = []
    handles = [
        net.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        net.register_forward_hook(lambda module, args, result: seen.append((module is net, args)) or result + 1),
    ]
    assert torch.equal(net(X), here()(X * 2) + 1)
    assert seen[0][0]
    assert torch.equal(seen[0][1][0], X * 2)
    assert torch.equal(net.forward(X), here()(X))  # as with local modules
    for handle in handles:
        handle.remove()
    assert torch.equal(net(X), here()(X))


def with_hook(module: RRef[nn.Module]) -> None:
    module.local_value().register_forward_hook(lambda module, args, result: result * 10)


def test_remote_hooks_run_remotely(net: RemoteModule) -> None:
    rpc.rpc_sync("w1", with_hook, (net.get_module_rref(),))
    assert torch.equal(net(X), here()(X) * 10)


def test_local_backward_hooks(net: RemoteModule) -> None:
    seen: list[Any] = []
    handle = net.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))
    x = X.clone().requires_grad_()
    with autograd.context() as context_id:
        autograd.backward(context_id, [net(x).sum() + (x * 0).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x].sum(), here_gradient())
    assert torch.equal(seen[0], torch.ones(3, 2))
    handle.remove()


def here_gradient() -> Tensor:
    x = X.clone().requires_grad_()
    here()(x).sum().backward()
    assert x.grad is not None
    return x.grad.sum()


# ---- what it consists of


def test_parameters_as_references(net: RemoteModule) -> None:
    references = net.remote_parameters()
    assert [reference.owner_name() for reference in references] == ["w1"] * 4
    for reference, parameter in zip(references, here().parameters(), strict=True):
        assert torch.equal(reference.to_here(), parameter)
    assert net.remote_parameters(recurse=False) == []
    del references, reference


def test_submodules(net: RemoteModule) -> None:
    layer = net.get_submodule("first")
    assert isinstance(layer, RemoteModule)
    assert torch.equal(layer(X), here().first(X))
    assert net.get_submodule("") is net
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        net.get_submodule("nothing")
    del layer


REFUSED: dict[str, Callable[[RemoteModule], Any]] = {
    "parameters": lambda m: m.parameters(),
    "named_parameters": lambda m: m.named_parameters(),
    "buffers": lambda m: m.buffers(),
    "named_buffers": lambda m: m.named_buffers(),
    "children": lambda m: m.children(),
    "named_children": lambda m: m.named_children(),
    "get_parameter": lambda m: m.get_parameter("first.weight"),
    "get_buffer": lambda m: m.get_buffer("norm.running_mean"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attributes_of_local_modules_only(net: RemoteModule, name: str) -> None:
    with pytest.raises(ValueError, match=rf"Method ``{name}`` not supported for RemoteModule\. .+"):
        REFUSED[name](net)


def test_parts_cannot_be_set_locally(net: RemoteModule) -> None:
    with pytest.raises(ValueError, match="has no modules here: add_module puts a copy"):
        net.more = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="has no parameters here: register_parameter puts a copy"):
        net.more = nn.Parameter(torch.ones(1))
    net.note = 5
    assert net.note == 5


# ---- what changes it


def test_train_and_eval(net: RemoteModule) -> None:
    assert net.eval() is net
    assert not net.training
    assert not rpc.rpc_sync("w1", owner.read_member, (net.module_rref, "training"))[1]
    assert net.train() is net
    assert net.training
    assert rpc.rpc_sync("w1", owner.read_member, (net.module_rref, "training"))[1]
    with pytest.raises(ValueError, match="training mode is expected to be boolean"):
        net.train("yes")  # type: ignore[arg-type]
    assert net.training is True


def test_conversions(net: RemoteModule) -> None:
    assert net.double() is net
    assert net.state_dict()["first.weight"].dtype == torch.float64
    assert net.to(torch.float16) is net
    assert net.state_dict()["first.weight"].dtype == torch.float16
    assert net.device == "cpu"
    assert net.to("meta").device == "meta"


def test_other_changes(net: RemoteModule) -> None:
    assert net.apply(noting) is net
    assert torch.equal(net.state_dict()["first.weight"], torch.full((2, 4), 2.0))
    net.requires_grad_(False)
    assert not any(reference.to_here().requires_grad for reference in net.remote_parameters())
    net.requires_grad_()
    net.zero_grad()
    net.register_buffer("extra", torch.ones(2))
    net.register_parameter("more", nn.Parameter(torch.zeros(1)))
    net.add_module("again", nn.Linear(1, 1))
    assert {"extra", "more", "again.weight"} <= set(net.state_dict())
    assert len(net.remote_parameters()) == 7


# ---- its state


def test_state_is_saved_and_loaded(net: RemoteModule) -> None:
    state = net.state_dict()
    local = here()
    local.load_state_dict(state)  # names and metadata are those of a module here
    assert local.state_dict()._metadata.keys() == state._metadata.keys()
    state["first.bias"] = torch.full((2,), 7.0)
    assert net.load_state_dict(state) == ([], [])
    assert torch.equal(net.state_dict()["first.bias"], torch.full((2,), 7.0))
    assert net.load_state_dict(local.state_dict()) == ([], [])
    assert torch.equal(net.state_dict()["first.bias"], local.first.bias)


def test_state_that_does_not_fit(net: RemoteModule) -> None:
    missing, unexpected = net.load_state_dict({"first.bias": torch.ones(2), "x": torch.ones(1)}, strict=False)
    assert unexpected == ["x"]
    assert "first.weight" in missing
    with pytest.raises(RuntimeError, match=r"Missing key(.|\n)*first.weight(.|\n)*Unexpected key(.|\n)*\"x\""):
        net.load_state_dict({"x": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.bias"):
        net.load_state_dict({**here().state_dict(), "first.bias": torch.ones(5)})


def test_state_is_written_to_files(net: RemoteModule) -> None:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    before = net.state_dict()
    net.apply(noting)
    net.load_state_dict(torch.load(file))
    assert torch.equal(net.state_dict()["first.weight"], before["first.weight"])


# ---- in a larger module


class Hybrid(nn.Module):
    def __init__(self, remote: RemoteModule) -> None:
        super().__init__()
        self.remote = remote
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.remote(x))
        return y


def test_as_a_submodule(net: RemoteModule) -> None:
    hybrid = Hybrid(net)
    assert hybrid(X).shape == (3, 1)
    assert [name for name, _ in hybrid.named_parameters()] == ["head.weight", "head.bias"]
    assert list(hybrid.buffers()) == []
    assert [name for name, _ in hybrid.named_modules()] == ["", "remote", "head"]
    assert "RemoteModule(on='w1'" in repr(hybrid)
    hybrid.eval()
    assert not net.training
    hybrid.double()  # what is here; the remote part has its own call
    assert net.state_dict()["first.weight"].dtype == torch.float32
    hybrid.float().zero_grad()
    hybrid.apply(noting)
    assert torch.equal(net.state_dict()["first.weight"], torch.full((2, 4), 2.0))


def test_apply_of_a_containing_module_resets_and_freezes_all(net: RemoteModule) -> None:
    hybrid = Hybrid(net)
    with autograd.plain():
        hybrid(X).sum().backward()
    hybrid.apply(nn.Module.zero_grad)
    hybrid.apply(lambda module: module.requires_grad_(False))
    for parameter in [*map(RRef, hybrid.parameters()), *net.remote_parameters()]:
        assert rpc.rpc_sync(parameter.owner(), is_reset_and_frozen, (parameter,))


def test_state_of_a_containing_module(net: RemoteModule) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.remote = here()
            self.head = nn.Linear(2, 1)

    hybrid, local = Hybrid(net), Local()
    state = hybrid.state_dict()
    assert list(state) == list(local.state_dict())
    assert state._metadata.keys() == local.state_dict()._metadata.keys()
    assert state._metadata["remote.norm"] == {"version": 2}
    local.load_state_dict(state)
    hybrid.load_state_dict({key: value * 2 for key, value in state.items()})
    assert torch.equal(net.state_dict()["first.weight"], state["remote.first.weight"] * 2)
    with pytest.raises(RuntimeError, match=r"Missing key(.|\n)*remote.first.weight"):
        hybrid.load_state_dict({"head.weight": torch.ones(1, 2)})


# ---- sent, shared, adopted


def test_sent_to_another_worker(net: RemoteModule) -> None:
    net.eval()
    result, encoded, on = rpc.rpc_sync("w2", use, (net, X))
    assert torch.equal(result, here().eval()(X))
    assert torch.equal(encoded, X.sum(1) + 1)
    assert on == "w1"
    again = rpc.rpc_sync("w2", pass_back, (net,))
    assert type(again) is RemoteModule
    assert not again.training
    assert torch.equal(again(X), net(X))
    again.register_forward_hook(lambda module, args, result: result * 0)
    assert not again(X).any()
    assert net(X).any()
    del again


class Mine(RemoteModule):
    """A class of the program's own."""

    def twice(self, x: Tensor) -> Tensor:
        result: Tensor = self(x) * 2
        return result


@pytest.mark.usefixtures("three")
def test_a_subclass_keeps_its_type() -> None:
    mine = Mine("w1", nn.Linear, (4, 1))
    again = rpc.rpc_sync("w2", pass_back, (mine,))
    assert type(again) is Mine
    assert torch.equal(again.twice(X), mine(X) * 2)


def test_pickling_outside_of_calls_raises(net: RemoteModule) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: torch.save(net, io.BytesIO()),
        lambda: pickle.dumps(net),
        lambda: copy.deepcopy(net),
    ]
    for attempt in uses:
        with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC"):
            attempt()


def test_from_a_reference(net: RemoteModule) -> None:
    others = [RemoteModule.init_from_module_rref(place, net.get_module_rref()) for place in ("w1/cpu", "w1", "cpu")]
    net.apply(noting)
    assert [(other.on, other.device, torch.equal(other(X), net(X))) for other in others] == [("w1", "cpu", True)] * 3
    for elsewhere in ("w2", "rank:0/cpu"):
        with pytest.raises(ValueError, match="is on worker w1, not on w"):
            RemoteModule.init_from_module_rref(elsewhere, net.get_module_rref())
    module = nn.Linear(4, 1)
    mine = RemoteModule.init_from_module_rref("cpu", RRef(module))
    assert torch.equal(mine(X), module(X))
    del others, mine


def test_nested_tensors_are_moved_to_another_device() -> None:
    value = ({"a": [X, 1]}, (X, "text"), torch.return_types.max((X, X)), None)
    moved = owner.moved(value, torch.device("meta"))
    assert moved[0]["a"][0].is_meta
    assert moved[0]["a"][1] == 1
    assert moved[1][0].is_meta
    assert moved[2].values.is_meta
    assert moved[3] is None
    assert not X.is_meta


@pytest.mark.parametrize("within", [False, True])
def test_the_error_of_torchs_state_dict_functions_names_those_to_use(net: RemoteModule, within: bool) -> None:
    model = nn.Sequential(net, nn.Linear(2, 1)) if within else net
    for read in (get_model_state_dict, lambda model: get_state_dict(model, [])):
        with pytest.raises(ValueError, match=r"``state_dict\(\)``, to ``save`` and `telegrad\.optim\.load_checkpoint`"):
            read(model)


class Extra(nn.Linear):
    """Module with extra state."""

    extra = 1

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


@pytest.mark.usefixtures("three")
def test_extra_state() -> None:
    module = RemoteModule("w1", Extra, (2, 2))
    assert module.get_extra_state() == 1
    module.set_extra_state(2)
    assert module.get_extra_state() == 2
    other = RemoteModule("w2", Extra, (2, 2))
    other.load_state_dict(module.state_dict())
    assert other.get_extra_state() == 2
