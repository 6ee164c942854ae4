"""The native engine of a worker, and the native half of its thread pool, told what they need of Python."""

from typing import Any

from telegrad import _core
from telegrad.options import Options
from telegrad.serialize.names import resolver
from telegrad.types import WorkerInfo
from telegrad.wire import Flag, Tag
from telegrad.worker.calls import NOT_PLAIN_REPLY, complete
from telegrad.worker.handlers import NOT_PLAIN_REQUEST
from telegrad.worker.rendezvous import Group
from telegrad.worker.scope import Scope, clean_state, current
from telegrad.worker.uses import fetch

__all__ = ["NOT_PLAIN", "Unusual", "make_engine", "make_plain_pool"]

NOT_PLAIN: int = _core.PlainCalls.NOT_PLAIN  # see there
Unusual: type[_core.Unusual] = _core.Unusual

_SECOND = 1_000_000_000


def make_engine(info: WorkerInfo, incarnation: int, group: Group, options: Options) -> _core.Engine:
    """One that listens nowhere yet and knows nobody."""
    return _core.Engine(
        id=info.id,
        name=info.name,
        incarnation=incarnation,
        group=group.token,
        secret=group.secret,
        spin=options.spin_us * 1000,
        handlers=options.num_worker_threads,
        window=options.request_window_bytes,
        pool_cache=options.pool_cache_bytes,
        handshake_timeout=int(options.handshake_timeout * _SECOND),
        connect_timeout=int(options.connect_timeout * _SECOND),
        max_body=options.max_header_bytes,
        max_message=options.max_message_bytes,
        shared_memory=options.shared_memory_bytes,
        lanes=options.tcp_lanes,
        check_uid=True,
    )


def make_plain_pool(worker: Any, callback_scope: Scope) -> _core.PlainPool:
    """What the pool threads of a worker wait on, which has its calls and handlers already."""
    return _core.PlainPool(
        engine=worker.engine,
        codec=worker.messages.serializer.codec,
        recorder=worker.autograd,
        call=Tag.CALL,
        value=Tag.VALUE,
        make=Tag.MAKE,
        created=Tag.CREATED,
        gradients=Tag.GRADIENTS,
        ended=Tag.CONTEXT_ENDED,
        may_linger=Flag.MAY_LINGER,
        request_flags=NOT_PLAIN_REQUEST,
        reply_flags=NOT_PLAIN_REPLY,
        preamble=Flag.PREAMBLE,
        worker=worker,
        scope_type=Scope,
        current=current,
        callback_scope=callback_scope,
        resolver=resolver,
        clean_state=clean_state,
        make_value=worker.handlers.make,
        answer=worker.handlers.answer,
        complete=complete,
        fail=worker.calls.fail,
        on_gradients=worker.autograd.on_gradients,
        on_ended=worker.autograd.on_ended,
        fetch=fetch,
        values=worker.references.values,
    )
