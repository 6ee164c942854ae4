"""Parameter groups of a distributed optimizer, and the part of each owner."""

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, equal

from telegrad.optim.local import LocalOptimizer
from telegrad.optim.owner import Changes, RemoteGroup
from telegrad.rref import RRef

__all__ = ["Part", "keep_tensors", "part_of", "read_group", "read_groups", "tensors_of"]


class Part:
    """Part of a distributed optimizer at one owner, as the optimizer's user has it.

    Attributes:
        rref: reference to the owner's part.
        groups: numbers of the groups that it has a part of, in the owner's order.
        ids: ids of its parameters among all of the optimizer, in the owner's order.
        shapes: of its parameters.
        sent: options of its groups that the owner has.
    """

    def __init__(self, rref: RRef[LocalOptimizer]) -> None:
        self.rref: RRef[LocalOptimizer] = rref
        self.groups: list[int] = []
        self.ids: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.sent: list[dict[str, Any]] = []

    def add(
        self, groups: Iterable[int], ids: Iterable[int], shapes: Iterable[Sequence[int]], options: Iterable[Any]
    ) -> None:
        """Record groups that the owner has got."""
        self.groups += groups
        self.ids += ids
        self.shapes += [tuple(shape) for shape in shapes]
        self.mark_sent([*self.sent, *options])

    def changes(self, param_groups: Sequence[Mapping[str, Any]]) -> Changes:
        """Return the options that the owner has other values of."""
        found = []
        for number, (group, sent) in enumerate(zip(self.groups, self.sent, strict=True)):
            changed = {key: value for key, value in param_groups[group].items() if not _is_sent(key, value, sent)}
            if changed:
                found.append((number, changed))
        return found

    def mark_changes_sent(self, changes: Changes) -> None:
        """Record that the owner has got the changes."""
        for number, options in changes:
            self.sent[number].update(_snapshot(options))

    def mark_changes_unknown(self, changes: Changes) -> None:
        """Record that the owner may or may not have got the changes.

        Their options are sent again, whatever their values are by then.
        """
        for number, options in changes:
            for key in options:
                self.sent[number].pop(key, None)

    def mark_options_unknown(self) -> None:
        """Record that the owner may have any options: all are sent again."""
        self.sent = [{} for _ in self.groups]

    def mark_sent(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Record the options of all groups at the owner."""
        self.sent = [_snapshot(each) for each in options]


def _is_sent(key: str, value: object, sent: Mapping[str, Any]) -> bool:
    if key in ("params", "param_names"):
        return True
    if key not in sent:
        return False
    before = sent[key]
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return value.dtype == before.dtype and value.shape == before.shape and equal(value.cpu(), before.cpu())
    return type(value) is type(before) and bool(value == before)


def _snapshot(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy options: programs change tensors among them in place."""
    return {
        key: value if isinstance(value, (float, int, str)) else copy.deepcopy(value) for key, value in options.items()
    }


# ---- what the constructor takes


def tensors_of(kind: object, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors among a constructor's arguments, by name.

    Args:
        kind: the optimizer's class.
        args: its arguments after the parameters.
        kwargs: its arguments by name.
    """
    named = {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}
    if any(isinstance(value, Tensor) for value in args) and callable(kind):
        names = list(inspect.signature(kind).parameters)[1:]
        named |= {key: value for key, value in zip(names, args, strict=False) if isinstance(value, Tensor)}
    return named


def keep_tensors(options: dict[str, Any], own: Mapping[str, object]) -> dict[str, Any]:
    """Replace an owner's copies of tensors by those of the program."""
    return {
        key: own[key] if isinstance(value, Tensor) and isinstance(own.get(key), Tensor) else value
        for key, value in options.items()
    }


def read_groups(entries: Sequence[Any]) -> tuple[list[RemoteGroup], bool]:
    """Return the groups that a constructor got, and whether it got groups.

    Raises:
        ValueError: there are no entries, or only some of the references have names.
        TypeError: an entry is neither a reference, nor a name and a reference, nor a group.
    """
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    if isinstance(entries[0], Mapping):
        return [read_group(entry) for entry in entries], True
    return [({}, *_split(entries))], False


def read_group(entry: object) -> RemoteGroup:
    """Return the options, references and names of a group.

    Raises:
        TypeError: the entry is no group of references, or these have no order.
        ValueError: only some of the references have names.
    """
    if not isinstance(entry, Mapping) or "params" not in entry:
        raise TypeError(f'a parameter group is a dict with "params", not {entry!r}')
    params = entry["params"]
    if isinstance(params, (set, frozenset)):
        raise TypeError('the "params" of a group are a set, which has no order: use a list instead')
    members = [params] if isinstance(params, RRef) else list(params)
    return {key: value for key, value in entry.items() if key != "params"}, *_split(members)


def _split(members: Sequence[Any]) -> tuple[list[RRef[Any]], list[str] | None]:
    """Return the references, and their names if they have any."""
    names: list[str] | None = None
    are_pairs = [isinstance(member, tuple) and len(member) == 2 for member in members]
    if any(are_pairs):
        if not all(are_pairs):
            raise ValueError(
                "some parameters of a DistributedOptimizer are pairs of a name and an RRef, and some have no name: name"
                " all of a group, or none"
            )
        names = [name for name, _ in members]
        members = [rref for _, rref in members]
    for member in members:
        if not isinstance(member, RRef):
            raise TypeError(
                f"DistributedOptimizer takes RRefs to parameters, but got a {type(member).__name__}. For a parameter of"
                " this worker, pass RRef(parameter)."
            )
    return list(members), names


def part_of(group: RemoteGroup, owner: int) -> tuple[RemoteGroup, list[int]] | None:
    """Return an owner's part of a group, and its members' places; None without any."""
    options, rrefs, names = group
    mine = [index for index, rref in enumerate(rrefs) if rref.owner_id == owner]
    if not mine:
        return None
    return (options, [rrefs[i] for i in mine], None if names is None else [names[i] for i in mine]), mine
