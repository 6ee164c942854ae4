"""RemoteModule of a drop-in refuses what torch's refuses."""

import pytest
import torch
from torch import nn

from telegrad import rpc
from telegrad.compat.nn import _REMOTE_MODULE_PICKLED_ATTRIBUTES, RemoteModule, _RemoteModule
from telegrad.testing import Cluster

X = torch.ones(2, 4)


def attributes(module: RemoteModule) -> list[str]:
    return list(module.__dict__)


def called(module: RemoteModule) -> torch.Tensor:
    result: torch.Tensor = module(X)
    return result


def given_back(module: RemoteModule) -> RemoteModule:
    return module


@torch.jit.interface
class Interface:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


@pytest.mark.usefixtures("two")
def test_unsupported_operations_raise() -> None:
    module = RemoteModule("w1/cpu", nn.Linear, (4, 1))
    for name in ("to", "state_dict", "named_modules", "children", "parameters", "share_memory", "extra_repr"):
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()
    with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
        module.parameters()
    with pytest.raises(AttributeError):
        module.in_features  # noqa: B018
    assert repr(module).startswith("RemoteModule(on='w1'")


@pytest.mark.usefixtures("two")
def test_as_a_submodule() -> None:
    whole = nn.Sequential(RemoteModule("w1/cpu", nn.Linear, (4, 2)), nn.Linear(2, 1))
    assert whole(X).shape == (2, 1)
    assert len(list(whole.parameters())) == 2
    assert list(whole.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    whole.load_state_dict(whole.state_dict())
    whole.double()
    whole.float().eval()


class WithHead(RemoteModule):
    """Remote module with a module of this process."""

    def __init__(self) -> None:
        super().__init__("w1/cpu", nn.Linear, (4, 3))
        self.head = nn.Linear(3, 1)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.forward(x))
        return y


@pytest.mark.usefixtures("two")
def test_a_subclass_with_a_local_submodule() -> None:
    module = WithHead()
    assert torch.equal(module.full(X), module.head(module(X)))
    whole = nn.Sequential(module, nn.Linear(3, 1))
    assert set(whole.parameters()) == {*module.head.parameters(), *whole[1].parameters()}
    expected = {"weight", "bias", "head.weight", "head.bias"}
    assert {name.removeprefix("0.") for name in whole.state_dict() if name.startswith("0.")} == expected
    assert torch.equal(rpc.rpc_sync("w1", called, (module,)), module(X))  # sent without its head
    with pytest.raises(ValueError, match="``register_parameter`` not supported"):
        module.scale = nn.Parameter(torch.ones(1))


@pytest.mark.usefixtures("two")
def test_a_sent_module_has_torchs_attributes_and_works() -> None:
    module = RemoteModule("w1/cpu", nn.Linear, (4, 1))
    module.extra = 1
    assert rpc.rpc_sync("w1", attributes, (module,)) == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    assert torch.equal(rpc.rpc_sync("w1", called, (module,)), module(X))
    again = rpc.rpc_sync("w1", given_back, (module,))
    assert type(again) is RemoteModule
    assert torch.equal(again.forward_async(X).wait(), module.forward(X))
    assert len(again.remote_parameters()) == 2
    again.eval()
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        torch.save(again, "/dev/null")


@pytest.mark.usefixtures("two")
def test_scripted() -> None:
    module = _RemoteModule("w1/cpu", nn.Linear, (4, 1), None, _module_interface_cls=Interface)
    assert module(X).shape == (2, 1)
    assert not module.is_scriptable
    with pytest.raises(RuntimeError, match="TorchScript makes no remote calls through Telegrad"):
        torch.jit.script(module)
    with pytest.raises(ValueError, match=r"must be a type object decorated by @torch.jit.interface"):
        _RemoteModule("w1/cpu", nn.Linear, (4, 1), _module_interface_cls=int)


def test_from_a_reference(two: Cluster) -> None:
    rref = two[0].remote("w1", nn.Linear, (4, 1))
    module = RemoteModule.init_from_module_rref("w1/cpu", rref)
    assert module.forward(X).shape == (2, 1)
    assert module.get_module_rref() is rref


def adopted(rref: rpc.RRef[nn.Module], place: str) -> tuple[object, int, torch.Tensor]:
    module = RemoteModule.init_from_module_rref(place, rref)
    return module.on, len(module.remote_parameters()), module(X)


@pytest.mark.parametrize("at", ["w0", "w1", "w2"])
def test_from_a_reference_with_the_name_of_another_worker(four: Cluster, at: str) -> None:
    """Run on the reference's creator, on the module's owner, and on a third worker."""
    rref = four[0].remote("w1", nn.Linear, (4, 1))
    expected = rref.rpc_sync().forward(X)
    for place, on in {"w0/cpu": "w0", "rank:0/cpu": 0, "w1": "w1", "w3/cpu": "w3", "cpu": "w1"}.items():
        found, parameters, result = rpc.rpc_sync(at, adopted, (rref, place))
        assert (found, parameters) == (on, 2)
        assert torch.equal(result, expected)
