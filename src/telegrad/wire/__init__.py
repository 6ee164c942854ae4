"""What stands in a message's header: tags and flags, one table each."""

from telegrad.wire.tags import ALWAYS_TAKEN, BodyKind, Flag, LeftOut, Status, Tag

__all__ = ["ALWAYS_TAKEN", "BodyKind", "Flag", "LeftOut", "Status", "Tag"]
