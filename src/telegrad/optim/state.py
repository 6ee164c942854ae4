"""State of a distributed optimizer in torch's format: whole, and per owner."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from telegrad.optim.groups import Part

__all__ = ["by_key", "check_groups", "check_shapes", "join", "split"]

State = dict[str, Any]

_OF_TORCH = ("state", "param_groups")
_OF_PARAMETERS = ("params", "param_names")

_OTHER_SHAPES = ("Adafactor", "LBFGS")  # torch's classes with state of other shapes than the parameters'


def join(param_groups: Sequence[Mapping[str, Any]], parts: Sequence[Part], states: Sequence[State]) -> State:
    """Return the whole state.

    Args:
        param_groups: the optimizer's groups.
        parts: its parts.
        states: each part's state.

    Raises:
        ValueError: several owners have further entries of their own.
    """
    further = {key: value for state in states for key, value in state.items() if key not in _OF_TORCH}
    if further and len(states) > 1:
        raise ValueError(
            f"the optimizers of several owners have {', '.join(map(repr, further))} in their states, which one state"
            " cannot have: use state_dict(owner=...) and load_state_dict(..., owner=...) for each owner"
        )
    groups = [{key: value for key, value in group.items() if key != "params"} for group in param_groups]
    entries: dict[Any, Any] = {}
    for part, state in zip(parts, states, strict=True):
        entries.update({part.ids[key] if isinstance(key, int) else key: v for key, v in state["state"].items()})
        for number, theirs in zip(part.groups, state["param_groups"], strict=True):
            groups[number].update({k: v for k, v in theirs.items() if k not in _OF_PARAMETERS})
    first = 0
    for group, mine in zip(groups, param_groups, strict=True):
        group["params"] = list(range(first, first + len(mine["params"])))
        first += len(mine["params"])
    in_order = sorted(entries, key=lambda key: key if isinstance(key, int) else first)
    return {**further, "state": {key: entries[key] for key in in_order}, "param_groups": groups}


def check_groups(param_groups: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> None:
    """Check that a state has the groups of an optimizer.

    Raises:
        ValueError: it has others.
    """
    saved = state["param_groups"]
    if len(saved) != len(param_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups:"
            f" {len(saved)}, while the optimizer has {len(param_groups)}"
        )
    for number, (mine, theirs) in enumerate(zip(param_groups, saved, strict=True)):
        if len(mine["params"]) != len(theirs["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group:"
                f" group {number} has {len(theirs['params'])} parameters, the optimizer's has {len(mine['params'])}"
            )


def split(part: Part, state: Mapping[str, Any]) -> State:
    """Return an owner's part of a whole state whose groups `check_groups` has checked.

    Every owner gets the entries that are not torch's, as an ordinary optimizer would.
    """
    saved = state["param_groups"]
    keys = [key for group in saved for key in group["params"]]  # of the state's entries, by id
    local_ids = {whole: local for local, whole in enumerate(part.ids)}
    groups = []
    for number in part.groups:
        first = sum(len(group["params"]) for group in saved[:number])
        whole_ids = range(first, first + len(saved[number]["params"]))
        options = {key: value for key, value in saved[number].items() if key not in _OF_PARAMETERS}
        groups.append({**options, "params": [local_ids[whole] for whole in whole_ids if whole in local_ids]})
    entries = by_key(state["state"], keys)
    mine = {local_ids[whole]: entries[keys[whole]] for whole in part.ids if keys[whole] in entries}
    others = {key: value for key, value in entries.items() if key not in set(keys)}  # of no parameter
    further = {key: value for key, value in state.items() if key not in _OF_TORCH}
    return {**further, "state": {**mine, **others}, "param_groups": groups}


def by_key(entries: Mapping[Any, Any], keys: Sequence[Any]) -> dict[Any, Any]:
    """Return state entries under the keys of their parameters.

    torch.distributed.checkpoint loads some of them under the key's text.
    """
    numbers = {str(key): key for key in keys}
    result: dict[Any, Any] = {}
    for key, value in entries.items():
        number = numbers.get(key, key) if isinstance(key, str) else key
        result[number] = {**result[number], **value} if number in result else value
    return result


def check_shapes(
    optimizer_class: Callable[..., object], part: Part, state: State, owner: str, name_of: Callable[[int], str]
) -> None:
    """Check that a state of torch's optimizers has the shapes of the parameters.

    Args:
        optimizer_class: the owner's class.
        part: the owner's part.
        state: its state.
        owner: name of the owner, for the error.
        name_of: returns the name of a parameter by its id, for the error.

    Raises:
        ValueError: a tensor has another shape than its parameter.
    """
    name = getattr(optimizer_class, "__name__", "")
    if not getattr(optimizer_class, "__module__", "").startswith("torch.optim") or name in _OTHER_SHAPES:
        return
    for local, values in state["state"].items():
        if not isinstance(local, int) or not isinstance(values, Mapping):
            continue
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != part.shapes[local]:
                raise ValueError(
                    f"the state {key!r} of {name_of(part.ids[local])} has the shape {list(value.shape)}, but the"
                    f" parameter on worker {owner} has the shape {list(part.shapes[local])}: load the state of an"
                    " optimizer of the same parameters, in the same order"
                )
