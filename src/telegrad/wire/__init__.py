"""What stands in a message's header: tags and flags, one table each."""

from telegrad.wire.tags import BodyKind, Flag, Status, Tag

__all__ = ["BodyKind", "Flag", "Status", "Tag"]
