"""Encode and decode a call for callgrind: coding.py CORE CASE TIMES.

It does not use PyTorch.

CASE: call (of an int), reply (an int), containers.
"""

import importlib.machinery
import importlib.util
import sys


class NoTensor:
    """Stands where the codec wants the type of tensors."""


def refuse(*_: object) -> None:
    raise AssertionError("there are no tensors here")


def main() -> None:
    path, case, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
    loader = importlib.machinery.ExtensionFileLoader("telegrad._core", path)
    spec = importlib.util.spec_from_file_location("telegrad._core", path, loader=loader)
    assert spec is not None
    core = importlib.util.module_from_spec(spec)
    loader.exec_module(core)
    codec = core.Codec(NoTensor, None, refuse, refuse)
    value = {
        "call": ((7,), {}),
        "reply": 7,
        "containers": (([1, 2.5, "x", b"y"],), {"key": {"a": None, "b": (True, 1 << 40)}}),
    }[case]
    body, segments = codec.encode(value)
    assert codec.decode(body, segments) == value
    encode, decode = codec.encode, codec.decode
    for _ in range(times):
        encode(value)
        decode(body, segments)


if __name__ == "__main__":
    main()
