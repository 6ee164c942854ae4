"""gRPC from Python: a unary method for each function.

Arguments with tensors are serialized by torch.save, others by pickle."""

import io
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.competitors.base import Client, Seat
from bench.competitors.forked import ForkedCompetitor

SERVICE = "bench.Functions"
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
]
THREADS = 16
CONNECT_TIMEOUT = 30.0
SAVED, PICKLED = b"t", b"p"


def encode(value: Any) -> bytes:
    parts = value if isinstance(value, tuple) else (value,)
    if not any(isinstance(part, torch.Tensor) for part in parts):
        return PICKLED + pickle.dumps(value, protocol=5)
    out = io.BytesIO()
    out.write(SAVED)
    torch.save(value, out)
    return out.getvalue()


def decode(data: bytes) -> Any:
    if data[:1] == PICKLED:
        return pickle.loads(memoryview(data)[1:])
    return torch.load(io.BytesIO(data[1:]), weights_only=False)


class GrpcClient(Client):
    def __init__(self, seat: Seat) -> None:
        import grpc

        from bench.functions import TABLE

        self._grpc = grpc
        self.rank, self.workers, self._seat = seat.rank, seat.workers, seat
        self._pool = ThreadPoolExecutor(THREADS)
        self._server = grpc.server(self._pool, options=OPTIONS)

        def handler(function: Callable[..., Any]) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                lambda args, _context: function(*args), request_deserializer=decode, response_serializer=encode
            )

        handlers = {name: handler(function) for name, function in TABLE.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._server.add_insecure_port(self._target(seat.rank))
        self._server.start()
        self._channels: dict[int, Any] = {}
        self._stubs: dict[tuple[int, str], Any] = {}

    def _target(self, rank: int) -> str:
        if self._seat.places:
            return f"{self._seat.address(rank)}:{self._seat.port}"
        return f"unix:{self._seat.folder / str(rank)}"

    def _stub(self, rank: int, function: Callable[..., Any]) -> Any:
        key = (rank, function.__name__)
        if key not in self._stubs:
            if rank not in self._channels:
                self._channels[rank] = self._connect(rank)
            path = f"/{SERVICE}/{function.__name__}"
            self._stubs[key] = self._channels[rank].unary_unary(
                path, request_serializer=encode, response_deserializer=decode
            )
        return self._stubs[key]

    def _connect(self, rank: int) -> Any:
        until = time.monotonic() + CONNECT_TIMEOUT
        while True:  # the other worker may not listen yet, and a channel that has failed once waits for a second
            channel = self._grpc.insecure_channel(self._target(rank), options=OPTIONS)
            try:
                self._grpc.channel_ready_future(channel).result(timeout=0.5)
                return channel
            except self._grpc.FutureTimeoutError:
                channel.close()
                if time.monotonic() > until:
                    raise

    def caller(self, rank: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        stub = self._stub(rank, function)
        return lambda: stub(args)

    def begin(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._stub(rank, function).future(args)

    def collect(self, begun: Sequence[Any]) -> list[Any]:
        return [one.result() for one in begun]

    def leave(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._server.stop(grace=0).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def serve(self, lifeline: int) -> None:
        os.read(lifeline, 1)
        self.leave()


class Grpc(ForkedCompetitor):
    name, package, distribution = "gRPC", "grpc", "grpcio"
    about = "gRPC in Python over a Unix socket (TCP between namespaces), tensors by torch.save, 16 threads"

    def join(self, seat: Seat) -> Client:
        torch.set_num_threads(1)
        return GrpcClient(seat)
