"""Cancellation as the callee sees it: `cancelled`."""

import time

from telegrad.worker.scope import current, not_needed
from telegrad.worker.serving.event_loop import coroutine_is_canceled

__all__ = ["cancelled"]


def cancelled() -> bool:
    """Return whether the caller of the running request no longer needs its result.

    The caller has canceled the call, its process is lost, or the deadline of the request has passed. A function that
    takes long asks this between two steps and returns early; its result is dropped. ``async def`` functions need not
    ask: they get ``asyncio.CancelledError``. What they run with ``asyncio.to_thread`` does ask. In a generator of
    `telegrad.rpc.stream`, it is True once the reader has closed the stream. It costs about a microsecond.

    Returns:
        Always False outside of remote calls, in callbacks, and while `telegrad.rpc.remote` creates a value, because
        other workers may use that value. There only the deadline counts.

    Raises:
        nothing.

    Example::

        def count_to(n: int) -> int:
            for i in range(n):
                if rpc.cancelled():
                    return i
            return n

        print(rpc.rpc_sync("worker1", count_to, args=(1000,)))  # 1000
    """
    scope = current.get()
    if scope is None or not scope.request:
        return False
    if scope.deadline and time.monotonic_ns() >= scope.deadline:
        scope.worker.engine.mark_late(scope.connection, scope.call)  # the reply may arrive before the caller notices
        return True
    if coroutine_is_canceled():  # its request has ended
        return True
    is_not_needed = not_needed.get()
    if is_not_needed is not None:  # of a stream, or of a call with a retry
        return is_not_needed()
    return bool(scope.worker.engine.is_canceled(scope.connection, scope.call))
