"""Description of a reference for `repr` and `dir`, without a call to its owner."""

from telegrad.errors import is_drop_in
from telegrad.rref.handle import AnyHandle

__all__ = ["describe", "global_id", "known_class", "missing_attribute"]


def known_class(rref: AnyHandle) -> type | None:
    """Return the class of the value if this worker knows it.

    It does if it is the owner, has fetched the type before, or called a class to create the value.
    """
    references = rref.worker.references
    if rref.is_owner():
        owned = references.values.get(rref.id)
        return type(owned.value) if owned is not None and owned.ready and owned.error is None else None
    future = rref._type_future
    if future is not None and future.done() and future.failure() is None:
        kind = future.value()
        return kind if isinstance(kind, type) else None
    return None if rref._creation is None else rref._creation.value_class


def missing_attribute(rref: object, name: str) -> AttributeError:
    """Return the error for an attribute that references do not have."""
    hint = ""
    if name == "grad":  # functions of torch for local parameters read it
        hint = (
            ": the gradient of a remote parameter is on its owner. Use telegrad.optim.clip_grad_norm_ and"
            " telegrad.optim.GradScaler instead of torch's."
        )
    return AttributeError(f"{type(rref).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=rref)


def describe(rref: AnyHandle) -> str:
    """Return the text of ``repr(rref)``; under the drop-in it is torch's."""
    this = global_id(*rref.id)
    if is_drop_in():
        if rref._fork is None:
            return f"OwnerRRef({this})"
        return f"UserRRef(RRefId = {this}, ForkId = {global_id(rref._forked_by, rref._fork)})"
    kind = known_class(rref)
    what = "a value" if kind is None else kind.__qualname__
    created_on, local_id = rref.id
    return f"<RRef to {what} on {_owner(rref)}, id {created_on}.{local_id}, {_state(rref)}>"


def _owner(rref: AnyHandle) -> str:
    name = rref.worker.members.name_of(rref.owner_id)
    return f"{name} (this worker)" if rref.is_owner() else name


def _state(rref: AnyHandle) -> str:
    references = rref.worker.references
    if references.closed:
        return "given up at shutdown"
    if rref.is_owner():
        owned = references.values.get(rref.id)
        if owned is None or not owned.ready:
            return "being made"
        return "ready" if owned.error is None else f"failed: {type(owned.error).__name__}"
    unusable_reason = references.unusable_reason(rref.id, rref.owner_id)
    if unusable_reason is not None:
        return f"unusable: {type(unusable_reason).__name__}"
    creation = rref._creation
    if creation is not None and creation.failure is not None:
        error = creation.failure.error
        return "failed" if error is None else f"failed: {type(error).__name__}"
    if rref._is_created or (creation is not None and creation.ended):
        return "ready"
    return "being made" if creation is not None else "held"


def global_id(created_on: int, local_id: int) -> str:
    """Return torch's text of an id."""
    return f"GloballyUniqueId(created_on={created_on}, local_id={local_id})"
