"""The public API: contexts, the backward pass, gradients.

Names with an underscore are torch's private ones."""

from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, TypeGuard

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from telegrad.autograd.context import Context
from telegrad.autograd.contexts import ID_BITS
from telegrad.autograd.passes.comm_hooks import CommHook
from telegrad.autograd.passes.profile import backward_range
from telegrad.autograd.recording import SEND_NODE, edges_of
from telegrad.autograd.service import Autograd
from telegrad.errors import NotInitialized, TelegradError
from telegrad.worker import Scope, Worker, current
from telegrad.worker.calls import tracing
from telegrad.worker.default_worker import current_worker

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "get_gradients",
    "is_available",
    "plain",
    "register_comm_hook",
]


NESTED = "Already have an autograd context id for this thread."
PLAIN_IN_CONTEXT = (
    "This thread has an autograd context, whose gradients stay in the context. Leave it before autograd.plain(), or"
    " call autograd.backward(context_id, [loss])."
)
NO_CONTEXT = (
    "Current thread doesn't have a valid autograd context. Please wrap your code using: `with"
    " torch.distributed.autograd.context() as context_id` to generate a valid context"
)
NO_WORKER = "Need to initialize distributed autograd using torch.distributed.autograd.init(): call rpc.init_rpc first."


def is_available() -> bool:
    """Return True: this package can always be used.

    Example::

        assert autograd.is_available()
    """
    return True


class context:
    """Context of a forward and backward pass: ``with context() as context_id:``.

    Calls of this thread or coroutine within it, and nested calls of their handlers on other workers, record the tensors
    that travel and require grad. Each context has its own gradients: `backward` never touches ``.grad``, and many
    contexts, of any workers, may be open over the same parameters at once. Leaving the context frees its records and
    gradients on every worker that took part. A context without calls sends no messages.

    Raises:
        RuntimeError: This process has not joined a group, or this thread or coroutine has a context already.

    Example::

        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.sum, args=(torch.ones(3, requires_grad=True),))
            autograd.backward(context_id, [loss])
    """

    __slots__ = ("_context", "_guard", "_inner", "_outer", "_service")

    def __enter__(self) -> int:
        """Open the context, and return its id, the same on all workers."""
        self._outer = current.get()
        self._service, self._inner = _enter_context(self._outer)
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
            _leave_context(self._context)
        self._service.contexts.end(self._context)


class plain:
    """Mode for backward passes without a context: ``with plain():``.

    Calls of this thread or coroutine within it, and nested calls of their handlers, record the tensors that travel and
    require grad. ``loss.backward()`` and ``torch.autograd.grad``, within it or later, then continue on the workers that
    sent these tensors, and return when all workers have finished. The gradients are added to ``.grad`` of the leaves on
    their workers, as in one process. The record of a tensor lasts as long as its receiver keeps the tensor, or one
    that was computed from it. Nothing is recorded without grad mode, for example in ``torch.no_grad()``.

    The option ``plain_backward`` (`telegrad.options.Options`) has the same effect on all calls of a worker that are
    outside of contexts.

    Raises:
        RuntimeError: This process has not joined a group, or this thread or coroutine has a context.

    Example::

        layer = rpc.remote("worker1", torch.nn.Linear, args=(4, 2))
        with autograd.plain():
            loss = layer.rpc_sync().forward(torch.ones(3, 4)).sum()
        loss.backward()  # the weight on worker1 has its gradient in .grad
    """

    __slots__ = ("_guard", "_outer")

    def __enter__(self) -> None:
        """Begin to record calls."""
        self._outer = current.get()
        service = _service()
        scope = self._outer or Scope(service.worker, 0, 0)
        if scope.autograd is not None and not scope.autograd.ended and not scope.autograd.is_plain:
            raise RuntimeError(PLAIN_IN_CONTEXT)
        current.set(scope._replace(worker=service.worker, autograd=service.plain))
        self._guard = service.context_guard(service.plain)
        if self._guard is not None:
            self._guard.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._guard is not None:
            self._guard.__exit__()
        current.set(self._outer)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of scalars with respect to all leaves.

    The leaves may be on any worker. Each worker accumulates the gradients of its leaves in the context; see
    `get_gradients`. Returns when all gradients are in place. The limit is the worker's rpc timeout, and in a handler
    the deadline of its caller.

    Args:
        context_id: The id that `context` returned.
        roots: Tensors of this worker with one element each, each the result of an operation.
        retain_graph: Keep the saved tensors of operations, for another pass over them.

    Raises:
        RuntimeError: There is no such context, a root is invalid, a worker was lost, or the pass timed out; or a
            coroutine has called this, and the pass would block the event loop of the worker; or the error of a backward
            function or a hook on any worker, see `telegrad.errors.RemoteError`.
        TypeError: `roots` is not a sequence of tensors.

    Example::

        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
            autograd.backward(context_id, [loss])
            print(autograd.get_gradients(context_id)[x])  # tensor([2., 2., 2.])
    """
    if not _is_id(context_id) or not isinstance(roots, (list, tuple)):
        raise _type_error(context_id, roots)
    for root in roots:
        if not isinstance(root, Tensor):
            raise _type_error(context_id, roots)
    service = _service()
    found = service.contexts.table.get(context_id) or _find(service, context_id)
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for number, root in enumerate(roots):
        if not root.requires_grad or root.grad_fn is None or root.numel() != 1:
            _raise_invalid_root(number, root)
    if tracing.observer.on:
        with backward_range():
            service.backward(found, list(roots), retain_graph)
    else:
        service.backward(found, list(roots), retain_graph)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients that a context has on this worker, by leaf.

    The result is a copy of the table, not of the gradients.

    Args:
        context_id: The id that `context` returned, on any worker.

    Raises:
        RuntimeError: This worker has no such context.
        TypeError: `context_id` is not an int.

    Example::

        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, args=(x,))])
            gradients = autograd.get_gradients(context_id)  # {x: tensor([1., 1., 1.])}
    """
    found = _find(_service(), context_id)
    with found.lock:
        return dict(found.gradients)


def register_comm_hook(state: object, hook: CommHook) -> RemovableHandle:
    """Compress the gradients that backward passes send from this worker.

    The function runs once per message with gradients, on the thread that sends it; it must return soon. The receiver
    needs no hook. Leaf gradients are not sent, so they are never compressed.

    Args:
        state: The hook's first argument, for example what it has left out so far.
        hook: Called with the state and a `GradientBucket`. It returns a function and a tuple of its arguments, which
            are sent; the receiver calls the function, which returns a list with one gradient for each of the bucket's.
            It returns None to send the gradients unchanged.

    Returns:
        A handle; its `remove` removes the hook, as does leaving it as a context manager.

    Raises:
        RuntimeError: The worker has a hook already, or this process has not joined a group. What the hook or its
            function raises fails the backward pass.
        TypeError: The hook is not callable, or an ``async def``.

    Example::

        def to_half(state, bucket):
            return to_float, ([None if g is None else g.half() for g in bucket.gradients],)

        def to_float(gradients):
            return [None if g is None else g.float() for g in gradients]

        x = torch.ones(3, requires_grad=True)
        with autograd.register_comm_hook(None, to_half), autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
            autograd.backward(context_id, [loss])
    """
    return _service().passes.comm_hooks.register(state, hook)


# ---- the context of the running code


def _enter_context(scope: Scope | None) -> tuple[Autograd, Scope]:
    """Open a context for the running code, and return the new scope.

    Args:
        scope: The current scope.
    """
    service = _service()
    if scope is None:
        inner = Scope(service.worker, 0, 0, autograd=service.contexts.open())
    else:
        if scope.autograd is not None and not scope.autograd.ended and not scope.autograd.is_plain:
            raise RuntimeError(NESTED)
        inner = scope._replace(worker=service.worker, autograd=service.contexts.open())
    current.set(inner)
    return service, inner


def _leave_context(context: Context) -> None:
    """Remove a context from the current scope, if the scope has it."""
    scope = current.get()
    if scope is not None and scope.autograd is context:
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
    found = service.contexts.table.get(context_id)
    if found is None:
        raise TelegradError(
            f"Could not find autograd context with id: {context_id}. It has been left, or no call that was made in it"
            " has reached this worker."
        )
    return found


# ---- roots


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int)


def _type_error(context_id: object, roots: object) -> TypeError:
    return TypeError(
        "backward(): incompatible function arguments. Its arguments are the id of a context, a list of tensors, and"
        f" retain_graph; got {context_id!r} and {type(roots).__name__}."
    )


def _raise_invalid_root(number: int, root: Tensor) -> NoReturn:
    which = f"root {number} of shape {tuple(root.shape)}"
    if not root.requires_grad:
        raise RuntimeError(f"requires_grad not set on root ({which}): none of its inputs requires grad.")
    if root.numel() != 1:
        raise RuntimeError(f"{which} is not a scalar, all roots need to be scalar. Call its sum(), for example.")
    raise RuntimeError(f"{which} does not have a valid gradient function. It must be the result of an operation.")


# ---- torch's private names


class _SendFunction:
    """Stand-in for torch's node of a sent message."""

    def __init__(self, next_functions: tuple[tuple[Node, int], ...]) -> None:
        self.next_functions = next_functions

    def name(self) -> str:
        return SEND_NODE


class DistAutogradContext:
    """A context with the private interface that torch's tests use.

    Example::

        from telegrad.compat import autograd as torch_autograd

        with autograd.context() as context_id:
            record = torch_autograd._retrieve_context(context_id)
            assert record._context_id() == context_id
    """

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
            return set(self._context.requests_sent)


def _new_context() -> DistAutogradContext:
    """Open a context for this thread."""
    return DistAutogradContext(_enter_context(current.get())[1].autograd)


def _release_context(context_id: int) -> None:
    """End a context."""
    service = _service()
    context = _find(service, context_id)
    _leave_context(context)
    service.contexts.end(context)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(_find(_service(), context_id))


def _current_context() -> DistAutogradContext:
    scope = current.get()
    if scope is None or scope.autograd is None or scope.autograd.ended or scope.autograd.is_plain:
        raise RuntimeError(NO_CONTEXT)
    return DistAutogradContext(scope.autograd)


def _is_valid_context(context_id: int) -> None:
    """Raise an error if the context does not exist, as in torch."""
    _find(_service(), context_id)


def _get_max_id() -> int:
    return _service().contexts.max_id


def _get_debug_info() -> dict[str, int]:
    return _service().stats()


def _init(worker_id: int) -> None:
    """Check the worker id. Torch's ``init_rpc`` calls this; it has no other effect."""
    if not 0 <= worker_id < 1 << (64 - ID_BITS):
        raise ValueError(f"worker_id needs to be in the range [0, {(1 << (64 - ID_BITS)) - 1}], but got {worker_id}")
