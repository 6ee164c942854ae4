"""Module on another worker, used like a local one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import nn

from telegrad import rpc
from telegrad.nn import owner
from telegrad.nn.method_names import class_made_by, method_names
from telegrad.nn.module_method import ModuleMethod, forward_method, needs_moves
from telegrad.nn.no_own_parameters import NoOwnParameters
from telegrad.nn.owner import AttributeInfo
from telegrad.nn.placement import placement_of
from telegrad.rpc.calls import Args, Kwargs
from telegrad.rref import RRef
from telegrad.rref.description import known_class
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.callables import checked_arguments
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.messages import is_serializing
from telegrad.worker.default_worker import current_worker

__all__ = ["PICKLE", "RemoteModule", "adopt", "make", "place", "refuse"]

R = TypeVar("R")

PICKLE = "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
_REFUSED = "Method ``{}`` not supported for RemoteModule"
_INSTEAD = {"parameters": ". Please use ``remote_parameters`` instead."}
_CHILDREN = (
    "``get_submodule`` gives remote modules. For ``torch.distributed.checkpoint``, pass the module, or its"
    " ``state_dict()``, to ``save`` and `telegrad.optim.load_checkpoint`: ``get_model_state_dict`` reads local modules."
)
_METADATA = "of the remote module"
_SENT = (
    *("on", "device", "is_device_map_set", "is_scriptable", "training", "module_rref"),
    "_RemoteModule__remote_methods",
)


def refuse(name: str, why: str = "") -> NoReturn:
    """Raise torch's error for a method that remote modules do not support.

    Raises:
        ValueError: always.
    """
    raise ValueError(_REFUSED.format(name) + (_INSTEAD.get(name) or (f". {why}" if why else "")))


class RemoteModule(NoOwnParameters):
    """Module that is created, resides and runs on another worker.

    Locally it is an ``nn.Module`` without its own parameters, which can be part of a larger module. Calling it runs the
    remote module and records for distributed autograd. A subclass may override `forward`, which then runs here; the
    other calls of it (``module.forward.rpc_async(x)``) and `forward_async` run that of the remote module.

    Any method of the remote module can be called on it. Methods that torch defines for modules apply to the remote
    module: `to`, `double`, `train`, `requires_grad_`, `apply` ... return this object; their arguments are copied to the
    owner. Hooks registered on this object run locally, around the call. Methods that would return parameters, buffers
    or modules raise ``ValueError``: `remote_parameters` returns references, `state_dict` copies, `get_submodule` remote
    modules.

    It can be sent in remote calls, and then refers to the same remote module. Hooks and the program's own attributes
    are not sent. It cannot be pickled outside of calls.

    Args:
        remote_device: ``"<worker>/<device>"``, ``"rank:<rank>/<device>"``, either without a device (for the CPU), or a
            device of this worker.
        module_cls: creates the module on its worker: a class, or any other callable that can be serialized.
        args, kwargs: its arguments, copied to the worker.

    Attributes:
        on: name or rank of the worker.
        device: the device, as text.
        is_device_map_set: whether calls between the two workers carry tensors of other devices than the CPU; False so
            far.
        is_scriptable: False; TorchScript cannot make remote calls through Telegrad.
        training: the mode last set with `train` or `eval` through this object.
        module_rref: the reference to the module.

    Raises:
        AssertionError: this process has not joined a group.
        ValueError, RuntimeError: remote_device is invalid. The first use raises errors of the module's constructor.

    Example::

        embedding = RemoteModule("worker1/cpu", torch.nn.Embedding, (1000, 16))
        model = torch.nn.Sequential(embedding, torch.nn.Linear(16, 1))
        y = model(torch.tensor([1, 2, 3]))                   # shape (3, 1)
        references = embedding.remote_parameters()           # for a DistributedOptimizer
    """

    on: str | int
    device: str
    is_scriptable: bool
    is_device_map_set: bool
    module_rref: RRef[nn.Module]
    __remote_methods: Sequence[str] | None = None  # the methods by the class of the module; None if it is unknown

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give the `forward` of a subclass the calls of the remote module's."""
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("forward")
        if isinstance(own, FunctionType):
            cls.forward = forward_method(own)  # type: ignore[method-assign]

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., nn.Module],
        args: Args = None,
        kwargs: Kwargs = None,
    ) -> None:
        super().__init__()
        place(self, remote_device, _worker().info.name)
        make(self, module_cls, args, kwargs, None)
        self.__remote_methods = _methods_of(class_made_by(module_cls))

    @classmethod
    def init_from_module_rref(cls, remote_device: str | torch.device, module_rref: RRef[nn.Module]) -> Self:
        """Return a remote module for a module that exists on any worker of the group.

        Args:
            remote_device: its location: as for the class, or only a device of the reference's owner. It is not moved.
            module_rref: a reference to the module.

        Raises:
            ValueError: remote_device names a worker other than the reference's owner.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        adopt(made, remote_device, module_rref)
        made.__remote_methods = _methods_of(class_made_by(known_class(module_rref)))
        named, real = _worker().members.resolve(made.on), module_rref.owner()
        if named.id != real.id:
            raise ValueError(f"the module of {module_rref!r} is on worker {real.name}, not on {named.name}")
        return made

    # ---- running the module

    @forward_method
    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the remote module, including its hooks, and wait for the result.

        Raises:
            errors of the module or of its constructor.
        """
        check_blocking("calling a remote module", "`await module.forward_async(...)`")  # before it runs
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: object, **kwargs: object) -> CallFuture[Any]:
        """Run the remote module and return the future of its result.

        Hooks registered on this object do not run: only calling the object runs them.
        """
        if needs_moves(self.device):
            return _async(self, owner.forward_on_device, self.device, self.is_device_map_set, args, kwargs)
        future: CallFuture[Any] = self.module_rref.rpc_async().__call__(*args, **kwargs)
        return future

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the remote module: a method, or a copy of a value."""
        if name.startswith("__") or "module_rref" not in self.__dict__:
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)  # a module or parameter of this object
        except AttributeError:
            pass
        if self.__remote_methods is not None and name in self.__remote_methods:
            return ModuleMethod(self, name)
        check_blocking(
            f"reading {name!r} of a remote module, from the owner,",
            f"`await module.module_rref.call().{name}(...)` for a method, and read values in an ordinary function",
        )
        kind, value, methods = _sync(self, owner.read_member, name, self.__remote_methods is None)
        if self.__remote_methods is None:
            self.__remote_methods = methods
        if kind == AttributeInfo.METHOD:
            return ModuleMethod(self, name)
        if kind == AttributeInfo.VALUE:
            return value
        mine = type(self).__name__
        if kind == AttributeInfo.MISSING:
            raise AttributeError(f"neither {mine!r} nor the remote {value!r} has an attribute {name!r}")
        instead = "get_submodule" if kind == AttributeInfo.MODULE else "remote_parameters or state_dict"
        raise AttributeError(f"{name!r} is a {_KINDS[kind]} of the remote module, not of this {mine}: use {instead}")

    # ---- what it consists of

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters, for a `DistributedOptimizer`.

        They are in the order of ``parameters()``.

        Args:
            recurse: include parameters of submodules.
        """
        references: list[RRef[nn.Parameter]] = _sync(self, owner.parameters_of, recurse)
        return references

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    def get_submodule(self, target: str) -> "RemoteModule":
        """Return a submodule as a remote module.

        Args:
            target: its path, as for ``nn.Module.get_submodule``.

        Raises:
            AttributeError: there is no such submodule.
        """
        if not target:
            return self
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        made.__dict__.update({name: getattr(self, name) for name in _SENT})
        made.module_rref, made.__remote_methods = _sync(self, owner.submodule_of, target)
        return made

    def _refuse_own(self, name: str) -> NoReturn:
        refuse(name, "``remote_parameters`` gives references, ``state_dict`` copies.")

    def children(self) -> Iterator[nn.Module]:
        """Raise `ValueError`: the submodules are on another worker."""
        refuse("children", _CHILDREN)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Raise `ValueError` as `children` does."""
        refuse("named_children", _CHILDREN)

    def get_parameter(self, target: str) -> NoReturn:
        """Raise `ValueError`: the parameter is on another worker."""
        refuse("get_parameter", "``remote_parameters`` gives references, ``state_dict`` copies.")

    def get_buffer(self, target: str) -> NoReturn:
        """Raise `ValueError`: the buffer is on another worker."""
        refuse("get_buffer", "``state_dict`` gives copies.")

    # ---- its state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        state, metadata = _sync(self, owner.state_of, self.is_device_map_set)
        destination.update({prefix + key: value for key, value in state.items()})
        if hasattr(destination, "_metadata"):
            # The keys of a local module, and all metadata again: loading does not pass on that of submodules.
            noted = {prefix + key if key else prefix[:-1]: dict(value) for key, value in metadata.items()}
            noted.setdefault(prefix[:-1], {})[_METADATA] = metadata
            destination._metadata.update(noted)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        mine = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        metadata = local_metadata.get(_METADATA) or (getattr(state_dict, "_metadata", None) if not prefix else None)
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        missing, unexpected, error = _sync(self, owner.load_state, mine, dict(metadata or {"": local_metadata}), assign)
        missing_keys += [prefix + key for key in missing]
        unexpected_keys += [prefix + key for key in unexpected] if strict else []
        if error:
            error_msgs.append(f"on worker {self.module_rref.owner_name()}: {error}")

    def get_extra_state(self) -> Any:
        """Return a copy of the remote module's extra state."""
        return self.module_rref.rpc_sync().get_extra_state()

    # ---- changes of the module

    def train(self, mode: bool = True) -> Self:
        """Set the remote module's mode."""
        _change(self, "train", mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[..., object], recurse: bool = True) -> Self:
        """Do nothing: changes of a containing module do not apply to the remote module."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, nn.Parameter)):
            kind = "parameter" if isinstance(value, nn.Parameter) else "module"
            method = "register_parameter" if kind == "parameter" else "add_module"
            raise ValueError(f"a RemoteModule has no {kind}s here: {method} puts a copy into the remote module")
        super().__setattr__(name, value)

    # ---- serialization

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        if not is_serializing():
            raise RuntimeError(PICKLE)
        return arrived, (type(self), *(self.__dict__[name] for name in _SENT))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r}, module={self.module_rref!r})"


# The steps below are no methods of the class, which would hide methods of the remote module.


def place(module: RemoteModule, remote_device: str | torch.device, otherwise: str) -> None:
    """Set the module's location; `otherwise` is the default worker."""
    worker = _worker()
    found = placement_of(remote_device)
    module.on = otherwise if found.on is None else found.on
    module.device = str(found.device)
    worker.members.resolve(module.on)  # raises the error of an unknown worker before a request is made
    module.is_device_map_set = False
    module.is_scriptable = False


def make(module: RemoteModule, module_cls: object, args: Args, kwargs: Kwargs, interface: object) -> None:
    """Create the remote module at its location."""
    kind = _worker().calls.name_or_function(module_cls)
    arguments = (kind, *checked_arguments(args, kwargs), module.device, interface)
    module.module_rref = rpc.remote(module.on, owner.make_module, arguments)


def adopt(module: RemoteModule, remote_device: str | torch.device, module_rref: RRef[nn.Module]) -> None:
    """Set the location and the reference of a module that exists."""
    place(module, remote_device, module_rref.owner_name())
    module.module_rref = module_rref


def _async(module: RemoteModule, function: Callable[..., R], *args: object) -> CallFuture[R]:
    return rpc.rpc_async(module.module_rref.owner_id, function, (module.module_rref, *args))


def _sync(module: RemoteModule, function: Callable[..., R], *args: object) -> R:
    return rpc.rpc_sync(module.module_rref.owner_id, function, (module.module_rref, *args))


def _change(module: RemoteModule, method: str, *args: object, **kwargs: object) -> None:
    device = _sync(module, owner.change, method, args, kwargs)
    if device is not None:
        module.device = device


_KINDS: dict[int, str] = {AttributeInfo.MODULE: "submodule", AttributeInfo.TENSOR: "parameter or buffer"}


# Methods of modules that change the module: they run on the remote module, and return this object or nothing.
_RETURN_SELF = (
    "to",
    "to_empty",
    "cuda",
    "ipu",
    "xpu",
    "mtia",
    "cpu",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "requires_grad_",
    "share_memory",
    "apply",
)
_RETURN_NONE = (
    "compile",
    "zero_grad",
    "register_buffer",
    "register_parameter",
    "register_module",
    "add_module",
    "set_submodule",
    "set_extra_state",
)


def _add_method(name: str, returns_self: bool) -> None:
    def method(self: RemoteModule, *args: object, **kwargs: object) -> RemoteModule | None:
        _change(self, name, *args, **kwargs)
        return self if returns_self else None

    method.__name__, method.__qualname__ = name, f"RemoteModule.{name}"
    method.__doc__ = f"``nn.Module.{name}``, on the remote module."
    setattr(RemoteModule, name, method)


for _name in (*_RETURN_SELF, *_RETURN_NONE):
    _add_method(_name, _name in _RETURN_SELF)


def arrived(cls: type[RemoteModule], *sent: object) -> RemoteModule:
    """Create a remote module from its serialized form."""
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.__dict__.update(zip(_SENT, sent, strict=True))
    return made


def _methods_of(kind: type | None) -> Sequence[str] | None:
    return None if kind is None else method_names(kind)


def _worker() -> Worker:
    worker = current_worker()
    if worker is None:
        raise AssertionError("RemoteModule only works in RPC.")
    return worker
