"""Replacement of ``torch.distributed.nn.api.remote_module`` in a drop-in.

Programs written for torch may rely on the errors of its `RemoteModule`, and on the attributes of its objects after they
were sent. This class refuses the same methods and has the same attributes. Queries of a containing module are
supported, so its ``parameters()``, ``state_dict()`` and so on work where torch's fail.
"""

import types
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from torch import nn

from telegrad.nn import owner
from telegrad.nn import remote_module as _ours
from telegrad.rpc.calls import Args, Kwargs
from telegrad.rpc.internal import _internal_rpc_pickler  # noqa: F401  # as in torch's module
from telegrad.rref import RRef
from telegrad.worker.calls.messages import is_serializing

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES: Final = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)

_EMPTY: Final = (
    *("_parameters", "_buffers", "_modules", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)

_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING: Final = (
    *("training", "_non_persistent_buffers_set", "_is_full_backward_hook", "forward_async", "forward"),
    *_EMPTY,
)

_SerializedRemoteModule = namedtuple("_SerializedRemoteModule", _REMOTE_MODULE_PICKLED_ATTRIBUTES)  # type: ignore[misc]

_REFUSED: Final = (
    *("register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type", "float"),
    *("double", "half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook"),
    *("register_forward_hook", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers"),
    *("children", "named_children", "modules", "requires_grad_", "zero_grad", "share_memory", "extra_repr"),
)


def forward_async(self: "_RemoteModule", *args: object, **kwargs: object) -> Any:
    """Call the module's `forward`; return a future."""
    return _ours.RemoteModule.forward_async(self, *args, **kwargs)


def forward(self: "_RemoteModule", *args: object, **kwargs: object) -> Any:
    """Call the module's `forward` and wait."""
    return _ours.RemoteModule.forward(self, *args, **kwargs)


_GENERATED: Final = [forward_async, forward]


class _RemoteModule(_ours.RemoteModule):
    """Form of `telegrad.nn.RemoteModule` with torch's behavior.

    Args:
        remote_device, module_cls, args, kwargs: as of `telegrad.nn.RemoteModule`.
        _module_interface_cls: a TorchScript interface, for which the remote module is scripted. This object is not.
    """

    # A received object only has the attributes of torch's pickled form. These class attributes make it a module without
    # hooks.
    training = True
    for _name in _EMPTY:
        locals()[_name] = types.MappingProxyType({})
    del _name
    _non_persistent_buffers_set = frozenset[str]()  # type: ignore[assignment]
    _is_full_backward_hook = None

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Args = None,
        kwargs: Kwargs = None,
        _module_interface_cls: object = None,
    ) -> None:
        nn.Module.__init__(self)
        _ours.place(self, remote_device, _ours._worker().info.name)
        interface = _module_interface_cls
        if interface is not None and not getattr(interface, "__torch_script_interface__", False):
            raise ValueError(
                f"module_interface_cls {interface} must be a type object decorated by @torch.jit.interface"
            )
        _ours.make(self, module_cls, args, kwargs, interface)
        self._generate()

    def _generate(self) -> None:
        self.generated_methods = _GENERATED
        for method in _GENERATED:
            self.__dict__[method.__name__] = types.MethodType(method, self)

    @staticmethod
    def init_from_module_rref(  # type: ignore[override]
        remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: object = None
    ) -> "RemoteModule":
        """Wrap an existing module, as `telegrad.nn.RemoteModule.init_from_module_rref`.

        As in torch, `remote_device` may name a worker that is not the module's. Calls go to the owner of the reference.
        """
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        _ours.adopt(made, remote_device, module_rref)
        made._generate()
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        # As in torch, a subclass may have modules of this process.
        nn.Module.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # As in torch, attributes of the remote module are only available through its RRef's proxies.
        return nn.Module.__getattr__(self, name)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        if not is_serializing():
            raise RuntimeError(_ours.PICKLE)
        return _remote_module_reducer(self)

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            "a RemoteModule cannot be scripted: TorchScript makes no remote calls through Telegrad. Call it from"
            " Python."
        )

    # ---- refused when called by the program, supported when called by a containing module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error unless a containing module calls this."""
        if kwargs.get("destination") is None:
            _raise_not_supported("state_dict")
        return super().state_dict(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Raise an error unless a containing module calls this."""
        if memo is None:
            _raise_not_supported("named_modules")
        answered: Iterator[tuple[str, nn.Module]] = super().named_modules(memo, prefix, remove_duplicate)
        return answered


def _raise_not_supported(name: str) -> NoReturn:
    _ours.refuse(name)


def _refusing(name: str) -> object:
    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        _raise_not_supported(name)

    method.__name__ = name
    return method


for _name in _REFUSED:
    setattr(_RemoteModule, _name, _refusing(_name))


class RemoteModule(_RemoteModule):
    """Module on another worker, with torch's limits.

    See `telegrad.nn.RemoteModule` for the class without them.
    """

    def __init__(
        self, remote_device: str, module_cls: Callable[..., nn.Module], args: Args = None, kwargs: Kwargs = None
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


def _remote_module_reducer(remote_module: _RemoteModule) -> tuple[object, ...]:
    sent = tuple(remote_module.__dict__[name] for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)
    return _remote_module_receiver, sent


def _create_module(
    module_cls: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], device: str
) -> nn.Module:
    return owner.make_module(module_cls, args, kwargs, device)


def _create_module_with_interface(
    module_cls: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    device: str,
    module_interface_cls: object,
) -> RRef[nn.Module]:
    module = owner.make_module(module_cls, args, kwargs, device, module_interface_cls)
    return RRef(module, module_interface_cls)


_param_rrefs = owner.parameters_of


def _remote_module_receiver(*sent: object) -> RemoteModule:
    made = RemoteModule.__new__(RemoteModule)
    made.__dict__.update(_SerializedRemoteModule._make(sent)._asdict())
    made.generated_methods = _GENERATED
    for method in _GENERATED:
        made.__dict__[method.__name__] = types.MethodType(method, made)
    return made
