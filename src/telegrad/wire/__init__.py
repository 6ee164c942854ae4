"""Numbers that Python and the core share: tags and flags of messages, and layouts (csrc/wire/constants.h)."""

from telegrad.wire.layout import EventKind, MetadataField, NodeKind, ScopeField, WorkKind
from telegrad.wire.tags import ALWAYS_TAKEN, BodyKind, Flag, LeftOut, Status, Tag

__all__ = [
    "ALWAYS_TAKEN",
    "BodyKind",
    "EventKind",
    "Flag",
    "LeftOut",
    "MetadataField",
    "NodeKind",
    "ScopeField",
    "Status",
    "Tag",
    "WorkKind",
]
