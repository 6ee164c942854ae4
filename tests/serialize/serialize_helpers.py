"""Send messages as a transport does.

The bytes of every segment are copied into new memory, aligned as in the core.
"""

import ctypes
import math

import numpy as np
import torch

from telegrad import _core
from telegrad.serialize.pickling import Serializer
from telegrad.serialize.tensor_layout import decode_tensor, encode_tensor


def received(nbytes):
    """Return memory like the buffer pool's: 64-byte aligned, writable, of this size."""
    room = np.empty(nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    return room[begin : begin + nbytes]


def carry_segments(segments):
    arrived = []
    for address, nbytes, _owner in segments:
        memory = received(nbytes)
        ctypes.memmove(memory.ctypes.data, address, nbytes)
        arrived.append(memory)
    return arrived


def codec_pair(value, codec):
    body, segments = codec.encode(value)
    return codec.decode(body, carry_segments(segments))


def pickle_pair(value, serializer=None):
    serializer = serializer or Serializer()
    body, segments = serializer.dumps(value)
    return serializer.loads(body, carry_segments(segments))


def slow_codec(max_depth=64):
    """Return a codec that does not use torch's C function table."""
    return _core.Codec(torch.Tensor, None, encode_tensor, decode_tensor, max_depth)


def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


def same(a, b):
    """Compare deeply: types, the sign of zero, NaN, strides and bits of tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, a.stride(), a.requires_grad) == (
            b.dtype,
            b.shape,
            b.stride(),
            b.requires_grad,
        ) and bits(a) == bits(b)
    return a == b


class Replacer(torch.overrides.TorchFunctionMode):
    """Another thread's `tensor.data = ...`, between any two calls of torch.

    Args:
        tensor: The tensor.
        calls: Numbers of the calls after which it gets other memory.
    """

    def __init__(self, tensor, calls):
        super().__init__()
        self.tensor, self.calls, self.called = tensor, calls, 0
        self.before = []  # keeps the memory, so that addresses differ

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.data.__set__:
            self.called += 1
            if self.called in self.calls:
                self.before.append(self.tensor.untyped_storage())
                self.tensor.data = torch.full_like(self.tensor, len(self.before) + 1.0)
        return result


def is_within(address, nbytes, storage):
    return storage.data_ptr() <= address <= address + nbytes <= storage.data_ptr() + storage.nbytes()


def resized(tensor, nbytes):
    tensor.untyped_storage().resize_(nbytes)
    return tensor
