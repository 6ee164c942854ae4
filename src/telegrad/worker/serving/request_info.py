"""Facts of a received request."""

from typing import NamedTuple

from telegrad.protocols.rref import RRefId
from telegrad.worker.autograd_hooks import AutogradContext
from telegrad.worker.calls import tracing

__all__ = ["RequestInfo"]


class RequestInfo(NamedTuple):
    """Fields of a request that the reply needs."""

    peer: int
    connection: int
    call: int
    deadline: int
    target: RRefId | None = None  # the reference to create
    context: AutogradContext | None = None  # the autograd context that records tensors of the request and the reply
    recording: tracing.Recording | None = None  # recording of the handler
    by_pickler: bool = False  # the program's pickler encodes request and reply
