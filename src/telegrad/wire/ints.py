"""Tags, flags and statuses of messages as plain ints.

Code that runs for each call uses these: an operation of an enumeration takes a microsecond.
"""

from typing import Final

from telegrad.wire.tags import BodyKind, Flag, Status, Tag

__all__ = [
    "BODY_CODEC",
    "BODY_CUSTOM",
    "BODY_PICKLE",
    "FLAGS_OF_TORCH_STATE",
    "FLAG_BODY",
    "FLAG_FAILED",
    "FLAG_INFERENCE",
    "FLAG_INTERNAL",
    "FLAG_KEEP_AS",
    "FLAG_LEFT_OUT",
    "FLAG_METADATA",
    "FLAG_MUST_DELIVER",
    "FLAG_MUST_RUN",
    "FLAG_NO_GRAD",
    "FLAG_RECEIVER",
    "STATUS_CANCELED",
    "STATUS_PEER_LOST",
    "STATUS_REPLIED",
    "STATUS_STOPPED",
    "STATUS_TIMED_OUT",
    "STATUS_UNREACHABLE",
    "TAG_CALL",
    "TAG_CONNECT",
    "TAG_CREATED",
    "TAG_ERROR",
    "TAG_GRADIENTS",
    "TAG_REFERENCES",
    "TAG_VALUE",
]

TAG_CALL: Final = int(Tag.CALL)
TAG_CONNECT: Final = int(Tag.CONNECT)
TAG_CREATED: Final = int(Tag.CREATED)
TAG_ERROR: Final = int(Tag.ERROR)
TAG_GRADIENTS: Final = int(Tag.GRADIENTS)
TAG_REFERENCES: Final = int(Tag.REFERENCES)
TAG_VALUE: Final = int(Tag.VALUE)

FLAG_BODY: Final = int(Flag.BODY)
FLAG_FAILED: Final = int(Flag.FAILED)
FLAG_INFERENCE: Final = int(Flag.INFERENCE)
FLAG_INTERNAL: Final = int(Flag.INTERNAL)
FLAG_KEEP_AS: Final = int(Flag.KEEP_AS)
FLAG_LEFT_OUT: Final = int(Flag.LEFT_OUT)
FLAG_METADATA: Final = int(Flag.METADATA)
FLAG_MUST_DELIVER: Final = int(Flag.MUST_DELIVER)
FLAG_MUST_RUN: Final = int(Flag.MUST_RUN)
FLAG_NO_GRAD: Final = int(Flag.NO_GRAD)
FLAG_RECEIVER: Final = int(Flag.RECEIVER)

BODY_CODEC: Final = int(BodyKind.CODEC)
BODY_CUSTOM: Final = int(BodyKind.CUSTOM)
BODY_PICKLE: Final = int(BodyKind.PICKLE)

STATUS_CANCELED: Final = int(Status.CANCELED)
STATUS_PEER_LOST: Final = int(Status.PEER_LOST)
STATUS_REPLIED: Final = int(Status.REPLIED)
STATUS_STOPPED: Final = int(Status.STOPPED)
STATUS_TIMED_OUT: Final = int(Status.TIMED_OUT)
STATUS_UNREACHABLE: Final = int(Status.UNREACHABLE)

FLAGS_OF_TORCH_STATE: Final = FLAG_NO_GRAD | FLAG_INFERENCE
