"""Remote references."""

from telegrad.rref.proxy import RRefProxy
from telegrad.rref.rref import RRef

__all__ = ["RRef", "RRefProxy"]
