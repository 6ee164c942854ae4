"""Tables of the tags and flags in a message's header."""

from telegrad.wire.tags import ALWAYS_TAKEN, BodyKind, Flag, LeftOut, Status, Tag

__all__ = ["ALWAYS_TAKEN", "BodyKind", "Flag", "LeftOut", "Status", "Tag"]
