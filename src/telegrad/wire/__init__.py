"""Numbers that Python and the core share: tags, flags and layouts of messages."""

from telegrad.wire.layout import EventKind, Loss, MetadataField, NodeKind, ScopeField, WorkKind
from telegrad.wire.tags import ALWAYS_TAKEN, BodyKind, Flag, LeftOut, Status, Tag

__all__ = [
    "ALWAYS_TAKEN",
    "BodyKind",
    "EventKind",
    "Flag",
    "LeftOut",
    "Loss",
    "MetadataField",
    "NodeKind",
    "ScopeField",
    "Status",
    "Tag",
    "WorkKind",
]
