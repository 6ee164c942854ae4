"""Write seeds of the fuzzers of values and of metadata: what real workers send.

Usage: fuzz_seeds.py FOLDER. csrc/fuzz/seeds.cc writes those of the other fuzzers.
"""

import struct
import sys
from pathlib import Path

import torch

from telegrad.serialize.tensor_layout import make_codec

VALUES: dict[str, object] = {
    "numbers": (0, 127, 128, -1, 2**40, -(2**70), 1.5, 2j, True, None),
    "texts": ["", "short", "long " * 10, "ä", b"", b"bytes"],
    "nested": {"a": [1, (2, [3, {}])], 5: {True: ()}},
    "long": (list(range(20)), tuple(range(20)), {n: n for n in range(10)}),
    "tensor": (torch.ones(2, 3), torch.zeros(0, 4), torch.ones(())),
    "types": [torch.ones(3, dtype=d) for d in (torch.bool, torch.int64, torch.bfloat16, torch.complex64)],
    "strided": (torch.ones(4, 6)[:, ::2], torch.ones(5, requires_grad=True)),
}

# Tickets, target, autocast, context, message, headers, profile: see MetadataField in telegrad.wire.layout.
METADATA: dict[str, object] = {
    "context": ((), None, None, 7, 3, None, None),
    "chain": ((), None, None, -7, 0, None, None),
    "target": ((), (1, 5), None, None, None, None, None),
    "tickets": (((1, 5, 0, 1, 9, None),), None, None, 7, 3, None, None),
    "profile": ((), None, None, 7, 3, None, ("trace", 1)),
    "headers": ((), None, None, None, None, {"name": "text", "bytes": b"1"}, None),
    "no_number": ((), None, None, "x", "y", None, None),
    "no_tuple": [(), None],
}


def main(folder: Path) -> None:
    codec = make_codec()
    for target, seeds in (("codec", VALUES), ("metadata", METADATA)):
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, value in seeds.items():
            encoded = codec.encode(value)
            assert encoded is not None, name
            body, segments = encoded
            start = b""
            if target == "codec":
                start = bytes([0, len(segments)]) + b"".join(struct.pack("<H", size) for _, size, _ in segments)
            (folder / target / name).write_bytes(start + bytes(body))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
