"""Requests that need Python: to decode them, or for the caller's torch state."""

import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from telegrad.protocols.rref import RRefId
from telegrad.serialize.program_pickler import PickledCall
from telegrad.serialize.tensor_layout import Body, Buffer
from telegrad.wire.ints import FLAGS_OF_TORCH_STATE
from telegrad.worker.autograd_hooks import AutogradContext
from telegrad.worker.calls import tracing
from telegrad.worker.calls.encoded import CallMetadata
from telegrad.worker.calls.interceptors import is_internal
from telegrad.worker.scope import Autocast, current, enter_chain, handler_state
from telegrad.worker.serving.intercepted import Ended, InterceptedHandler
from telegrad.worker.serving.request_info import RequestInfo

if TYPE_CHECKING:
    from telegrad.worker.serving.handlers import Handlers

__all__ = ["SlowRequest"]


class SlowRequest:
    """Python's part of a request that the codec alone cannot decode."""

    def __init__(
        self,
        handlers: "Handlers",
        info: RequestInfo,
        flags: int,
        body: Body,
        segments: list[Buffer],
        metadata: CallMetadata,
    ) -> None:
        self.info: RequestInfo = info
        self.context: AutogradContext | None = metadata.context
        self.target: RRefId | None = info.target
        self.has_references: bool = bool(metadata.handles)
        self.recording: tracing.Recording | None = info.recording
        self.flags = flags
        self.has_state: bool = bool(flags & FLAGS_OF_TORCH_STATE)
        self.metadata = metadata
        inherits = handlers.worker.options.inherit_from_caller
        # torch's state of the handler, with its autocast
        self.handler_flags: int = flags & FLAGS_OF_TORCH_STATE if inherits else 0
        self.handler_autocast: Autocast = metadata.autocast if inherits else None
        self._handlers = handlers
        self._body = body
        self._segments = segments
        self._chain = metadata.chain
        self._guard = ExitStack()
        self._state = ExitStack()

    @property
    def has_slow_reply(self) -> bool:
        """Return whether Python encodes the reply, with a report or by a pickler."""
        return self.recording is not None or self.info.by_pickler

    @property
    def is_intercepted(self) -> bool:
        """Return whether the handler runs within interceptors."""
        return bool(self._handlers.interceptors.chain)

    def intercept(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return the handler within the worker's interceptors.

        The function decides whether they see the request. Its flags do not: a hostile member sets them at will.
        """
        if is_internal(function):
            return function
        handlers, info = self._handlers, self.info
        left = max(info.deadline - time.monotonic_ns(), 1) / 1e9 if info.deadline else 0.0
        kind, peer = "call" if info.target is None else "remote", handlers.worker.members.name_of(info.peer)

        def run_coroutine(coroutine: Coroutine[Any, Any, object], ended: Ended) -> Callable[[], None]:
            flags, autocast = self.handler_flags, self.handler_autocast
            return handlers.loop.run(coroutine, current.get(), flags, autocast, self.recording, ended)

        headers = self.metadata.headers
        return InterceptedHandler(handlers.interceptors.chain, function, kind, peer, left, headers, run_coroutine)

    def set_target(self, target: RRefId) -> None:
        """Set the reference that the request creates, which only its body names."""
        self.target = target
        self.info = self.info._replace(target=target)

    def enter(self) -> None:
        """Enter the autograd context's guard and the caller's torch state."""
        if self.context is not None:
            autograd = self._handlers.worker.autograd
            self._chain = autograd.chain_of_request(self.context, self._chain)
            if self._chain:
                enter_chain(self._chain)
            guard = autograd.handler_guard(self.context, self._chain)
            if guard is not None:
                self._guard.enter_context(guard)
        if self.handler_flags or self.handler_autocast:
            self._state.enter_context(handler_state(self.handler_flags, self.handler_autocast))

    def decode(self) -> Any:
        """Return the body: ([function,] args, kwargs[, local id to keep][, receiver])."""
        flags, metadata = self.flags, self.metadata
        body = self._handlers.messages.decode(flags, self._body, self._segments, metadata.handles, metadata.wrap)
        self._segments.clear()  # the arguments are the only holders: one of them can be returned without a copy
        if isinstance(body, PickledCall):
            self.info = self.info._replace(by_pickler=True)
        return body

    def leave_state(self) -> None:
        """Leave the caller's torch state."""
        self._state.close()

    def leave(self) -> None:
        """Leave the caller's torch state and the autograd context's guard."""
        self._state.close()
        self._guard.close()
