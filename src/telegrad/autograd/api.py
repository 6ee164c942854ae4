"""What programs call: contexts, the backward pass, gradients. Names with an underscore are torch's private ones."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.graph import Node

from telegrad.autograd.context import Context
from telegrad.autograd.contexts import ID_BITS
from telegrad.autograd.passes import profile as profiled
from telegrad.autograd.recording import SEND_NODE, edges_of
from telegrad.autograd.service import Autograd
from telegrad.errors import NotInitialized, TelegradError
from telegrad.worker import Scope, Worker, current
from telegrad.worker.calls import tracing
from telegrad.worker.default_worker import current_worker

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]

_new: Any = tuple.__new__  # a scope without its constructor's frame

NESTED = "Already have an autograd context id for this thread."
NO_CONTEXT = (
    "Current thread doesn't have a valid autograd context. Please wrap your code using: `with"
    " torch.distributed.autograd.context() as context_id` to generate a valid context"
)
NO_WORKER = "Need to initialize distributed autograd using torch.distributed.autograd.init(): call rpc.init_rpc first."


def is_available() -> bool:
    """Whether this package can be used: always."""
    return True


class context:
    """Around a forward pass and the backward pass through it; ``with context() as context_id:``.

    Calls that are made within, by this thread or coroutine and by the handlers that they run elsewhere, record the
    tensors that travel and require grad. Its gradients are its own: `backward` never touches ``.grad``, and many
    contexts, of any workers, may be open over the same parameters at once. Leaving it frees what was recorded and the
    gradients, on every worker that took part. Opening and leaving one within which nothing was called sends nothing.

    Raises:
        RuntimeError: this process has not joined a group, or there is a context already in this thread or coroutine.
    """

    __slots__ = ("_context", "_guard", "_inner", "_outer", "_service")

    def __enter__(self) -> int:
        """The context's id, the same on all workers."""
        self._outer = current.get()
        self._service, self._inner = _enter(self._outer)
        opened: Context = self._inner.autograd
        self._context = opened
        self._guard = self._service.context_guard(opened)
        if self._guard is not None:
            self._guard.__enter__()
        return opened.id

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._guard is not None:
            self._guard.__exit__()
        if current.get() is self._inner:
            current.set(self._outer)
        else:
            _leave(self._context)
        self._service.contexts.end(self._context)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Computes the gradients of the sum of some scalars with respect to the leaves of their graph, on all workers.

    They are added up in the context, at the worker of each leaf; see `get_gradients`. Returns when all are in place.
    Waits no longer than the worker's rpc time-out, and in a handler no longer than its caller does.

    Args:
        context_id: what `context` gave.
        roots: tensors of this worker with one element each, each the result of some operation.
        retain_graph: keep what operations have saved, so that there can be another pass over them.

    Raises:
        RuntimeError: there is no such context, a root is not as it should be, a worker was lost, or the time is over;
            or what a backward function or a hook raised, on whichever worker, see `telegrad.errors.RemoteError`.
        TypeError: roots is not a sequence of tensors.
    """
    if not _is_id(context_id) or not isinstance(roots, (list, tuple)):
        raise _no_arguments(context_id, roots)
    for root in roots:
        if not isinstance(root, Tensor):
            raise _no_arguments(context_id, roots)
    service = _service()
    found = service.contexts.table.get(context_id) or _find(service, context_id)
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for number, root in enumerate(roots):
        if not root.requires_grad or root.grad_fn is None or root.numel() != 1:
            _refuse(number, root)
    if tracing.observer.on:
        with profiled.whole():
            service.backward(found, list(roots), retain_graph)
    else:
        service.backward(found, list(roots), retain_graph)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that a context has on this worker, by leaf: a copy of the table, not of the gradients.

    Args:
        context_id: what `context` gave, here or elsewhere.

    Raises:
        RuntimeError: there is no such context here.
        TypeError: that is no id.
    """
    found = _find(_service(), context_id)
    with found.lock:
        return dict(found.gradients)


# ---- contexts in the thread


def _enter(scope: Scope | None) -> tuple[Autograd, Scope]:
    """Opens a context, and makes it that of what runs here, which has this scope: the new one."""
    service = _service()
    if scope is None:
        inner = _new(Scope, (service.worker, 0, False, False, service.contexts.open(), 0))
    else:
        if scope.autograd is not None and not scope.autograd.ended:
            raise RuntimeError(NESTED)
        inner = scope._replace(worker=service.worker, autograd=service.contexts.open())
    current.set(inner)
    return service, inner


def _leave(left: Context) -> None:
    """If it is that of what runs here, there is none any more."""
    scope = current.get()
    if scope is not None and scope.autograd is left:
        current.set(scope._replace(autograd=None))


def _service() -> Autograd:
    worker: Worker | None = current_worker()
    if worker is None or worker.closed:
        raise NotInitialized(NO_WORKER)
    service: Autograd = worker.autograd  # type: ignore[assignment]
    return service


def _find(service: Autograd, context_id: int) -> Context:
    if not _is_id(context_id):
        raise TypeError(f"incompatible function arguments: a context's id is an int, not {context_id!r}")
    found = service.contexts.find(context_id)
    if found is None:
        raise TelegradError(
            f"Could not find autograd context with id: {context_id}. It has been left, or no call that was made in it"
            " has come to this worker."
        )
    return found


# ---- roots


def _is_id(value: Any) -> bool:
    return isinstance(value, int)


def _no_arguments(context_id: Any, roots: Any) -> TypeError:
    return TypeError(
        "backward(): incompatible function arguments. It takes a context's id, a list of tensors, and whether to"
        f" retain the graph; got {context_id!r} and {type(roots).__name__}."
    )


def _refuse(number: int, root: Tensor) -> NoReturn:
    which = f"root {number} of shape {tuple(root.shape)}"
    if not root.requires_grad:
        raise RuntimeError(f"requires_grad not set on root ({which}): no tensor that it was made of requires grad.")
    if root.numel() != 1:
        raise RuntimeError(f"{which} is not a scalar, all roots need to be scalar. Sum it up, for example.")
    raise RuntimeError(f"{which} does not have a valid gradient function. It has to be an operation's result.")


# ---- torch's private names


class _SendFunction:
    """Stands for a node of torch's: what a message with tensors hangs on to."""

    def __init__(self, next_functions: tuple[tuple[Node, int], ...]) -> None:
        self.next_functions = next_functions

    def name(self) -> str:
        return SEND_NODE


class DistAutogradContext:
    """A context as torch's tests look at it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _send_functions(self) -> dict[int, _SendFunction]:
        with self._context.lock:
            sends = list(self._context.sends.values())
        return {
            sent.id: _SendFunction(tuple((edge.node, edge.output_nr) for edge in edges_of(sent) if edge is not None))
            for sent in sends
        }

    def _recv_functions(self) -> dict[int, Node]:
        with self._context.lock:
            return {received.id: received.node for received in self._context.receipts.values()}

    def _known_worker_ids(self) -> set[int]:
        with self._context.lock:
            return set(self._context.asked)


def _new_context() -> DistAutogradContext:
    """Opens a context, and makes it that of this thread."""
    return DistAutogradContext(_enter(current.get())[1].autograd)


def _release_context(context_id: int) -> None:
    """Leaves a context."""
    service = _service()
    left = _find(service, context_id)
    _leave(left)
    service.contexts.end(left)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(_find(_service(), context_id))


def _current_context() -> DistAutogradContext:
    scope = current.get()
    if scope is None or scope.autograd is None or scope.autograd.ended:
        raise RuntimeError(NO_CONTEXT)
    return DistAutogradContext(scope.autograd)


def _is_valid_context(context_id: int) -> None:
    """Raises if it is not, as in torch."""
    _find(_service(), context_id)


def _get_max_id() -> int:
    return _service().contexts.max_id


def _get_debug_info() -> dict[str, int]:
    return _service().stats()


def _init(worker_id: int) -> None:
    """Called by ``init_rpc`` in torch; here there is nothing to do."""
    if not 0 <= worker_id < 1 << (64 - ID_BITS):
        raise ValueError(f"worker_id needs to be in the range [0, {(1 << (64 - ID_BITS)) - 1}], but got {worker_id}")
