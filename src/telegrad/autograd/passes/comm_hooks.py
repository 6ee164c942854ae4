"""Communication hooks: functions that compress the gradients of a backward pass.

A hook replaces the gradients of a message by a function and its arguments, as ``__reduce__`` does for objects: the
receiver calls the function. The codec does not encode functions, so such messages take the slow path, and messages on
the fast path need no check.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from telegrad.autograd.context import WireMessage
from telegrad.autograd.passes.messages import GRADIENTS
from telegrad.worker.calls.callables import require_plain_function

__all__ = ["CommHook", "CommHooks", "Compressed", "GradientBucket", "decompress"]

_GRADIENTS_AT = 4  # position of the gradients in a message


class GradientBucket(NamedTuple):
    """Gradients that one message of a backward pass carries to another worker.

    Attributes:
        to: name of the receiver.
        gradients: of the tensors that the receiver sent in the forward pass; None for an undefined gradient. The hook
            must not change them in place.

    Example::

        def log_sizes(state, bucket):
            state.append((bucket.to, sum(g.numel() for g in bucket.gradients if g is not None)))

        sizes = []
        with autograd.register_comm_hook(sizes, log_sizes):
            x = torch.ones(3, requires_grad=True)
            with autograd.context() as context_id:
                autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()])
        print(sizes)  # [('worker1', 3)]
    """

    to: str
    gradients: list[Tensor | None]


Compressed: TypeAlias = tuple[Callable[..., Sequence[Tensor | None]], tuple[object, ...]]
"""A function that returns the gradients at the receiver, and its arguments."""

CommHook: TypeAlias = Callable[[Any, GradientBucket], Compressed | None]


class CommHooks:
    """The hook of a worker, if it has one.

    Args:
        name_of: Returns the name of a worker.

    Attributes:
        hooks: The hook and its state; empty without one.
    """

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self.hooks: OrderedDict[int, tuple[object, CommHook]] = OrderedDict()
        self._name_of = name_of

    def register(self, state: object, hook: CommHook) -> RemovableHandle:
        """Set the hook.

        Raises:
            RuntimeError: The worker has a hook.
            TypeError: The hook is not callable, or an ``async def``.
        """
        require_plain_function(hook, "a communication hook", "Compress the gradients without waiting.")
        if self.hooks:
            raise RuntimeError("this worker has a communication hook already: call remove() of its handle before")
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = state, hook
        return handle

    def compress(self, peer: int, messages: list[WireMessage]) -> list[WireMessage]:
        """Return messages to a peer with their gradients compressed."""
        result = []
        for message in messages:
            if message[0] == GRADIENTS and message[_GRADIENTS_AT]:
                for state, hook in list(self.hooks.values()):
                    gradients = message[_GRADIENTS_AT]
                    compressed = hook(state, GradientBucket(self._name_of(peer), gradients))
                    if compressed is not None:
                        packed = (*_checked(compressed), len(gradients))
                        message = (*message[:_GRADIENTS_AT], packed, *message[_GRADIENTS_AT + 1 :])
            result.append(message)
        return result


def _checked(compressed: object) -> Compressed:
    if isinstance(compressed, tuple) and len(compressed) == 2:
        function, arguments = compressed
        if callable(function) and isinstance(arguments, tuple):
            return function, arguments
    length = f" of {len(compressed)} items" if isinstance(compressed, (list, tuple)) else ""
    raise TypeError(
        f"a communication hook returned a {type(compressed).__name__}{length}: return None, or a function and a tuple"
        " of its arguments"
    )


def decompress(
    messages: list[WireMessage], callee_of: Callable[[bytes | Callable[..., object]], Callable[..., Iterable[object]]]
) -> list[WireMessage]:
    """Return messages with the gradients that compressed ones stand for.

    Args:
        messages: The messages.
        callee_of: Returns a function of a message, if this worker exposes it.

    Raises:
        NotExposed: This worker does not expose a function.
        TypeError: A function did not return a list with one gradient for each of the sender's.
        errors of the functions.
    """
    result = []
    for message in messages:
        if message[0] == GRADIENTS and isinstance(message[_GRADIENTS_AT], tuple):
            function, arguments, count = message[_GRADIENTS_AT]
            gradients = list(callee_of(function)(*arguments))
            wrong = [type(each).__name__ for each in gradients if not (each is None or isinstance(each, Tensor))]
            if wrong or len(gradients) != count:
                raise TypeError(
                    f"{getattr(function, '__qualname__', function)} of a communication hook returned"
                    f" {', '.join(wrong) or f'{len(gradients)} gradients'} for {count} gradients: return one tensor or"
                    " None for each of the bucket's gradients"
                )
            message = (*message[:_GRADIENTS_AT], gradients, *message[_GRADIENTS_AT + 1 :])
        result.append(message)
    return result
