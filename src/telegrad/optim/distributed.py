"""Optimizer of parameters on many workers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from telegrad.autograd.api import _is_valid_context
from telegrad.errors import NotInitialized
from telegrad.optim.failures import all_of
from telegrad.optim.local import LocalOptimizer
from telegrad.protocols.rref import RRefId
from telegrad.rref import RRef
from telegrad.worker import Worker
from telegrad.worker.default_worker import current_worker
from telegrad.worker.scope import current, remaining

__all__ = ["DistributedOptimizer"]

# A group sent to one owner: options, references, names.
_Group = tuple[dict[str, Any], list[RRef[Any]], "list[str] | None"]


class DistributedOptimizer:
    """Optimizer that steps parameters on their workers with an autograd context.

    Each owner of parameters gets its own ordinary optimizer. A step runs on all owners at the same time. Any number of
    trainers may have optimizers of the same parameters, and step them while others run forward and backward passes;
    see ``docs/optim.md`` for the values that each of them sees.

    Args:
        optimizer_class: any class of ``torch.optim``, or another with its interface: called on each owner with that
            owner's parameters and the further arguments.
        params_rref: `RRef`s to leaf tensors on any worker; or pairs of a name and such an `RRef`; or groups: dicts with
            these as "params" and with options of the group as other items.
        args, kwargs: further arguments of the class, sent to each owner.

    Attributes:
        remote_optimizers: references to the owners' parts.

    Raises:
        RuntimeError: this process has not joined a group, or an owner is lost.
        TypeError: params_rref is none of the above.
        errors of the class; those of several owners as one `ExceptionGroup` that is of all their types.

    Example::

        module = RemoteModule("worker1/cpu", torch.nn.Linear, (20, 1))
        optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.05)
        with autograd.context() as context_id:
            loss = module(torch.ones(8, 20)).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: object,
        **kwargs: object,
    ) -> None:
        worker = _worker()
        entries = list(params_rref)
        grouped = bool(entries) and isinstance(entries[0], Mapping)
        groups = [_group(entry) for entry in entries] if grouped else [({}, *_split(entries))]
        futures = []
        with _outside_contexts():
            for owner in dict.fromkeys(rref.owner_id for _, rrefs, _ in groups for rref in rrefs):
                theirs = [part for group in groups if (part := _part_of(group, owner)) is not None]
                arguments = (optimizer_class, theirs, grouped, args, kwargs)
                futures.append((owner, worker.rpc_async(owner, make_local_optimizer, arguments)))
        self.remote_optimizers: list[RRef[LocalOptimizer]] = _all_results(
            worker, f"{getattr(optimizer_class, '__name__', optimizer_class)} could not be made", futures
        )

    def step(self, context_id: int) -> None:
        """Step all parameters that have a gradient in the context, on all owners at once.

        Blocks until all owners have stepped.

        Args:
            context_id: an autograd context that is open on this worker.

        Raises:
            RuntimeError: "Could not find autograd context with id: ...", or an owner is lost.
            errors of the optimizers; those of several owners as one `ExceptionGroup` that is of all their types. The
                other owners have stepped.
        """
        _is_valid_context(context_id)
        worker = _worker()
        here = worker.info.id
        futures: list[tuple[int, object]] = []
        # This worker's own part comes last, because it runs on this thread; that also decides its turn at the step
        # lock. Without an own part, this thread waits for the last of the other owners: this is faster than a future.
        ordered = sorted(self.remote_optimizers, key=lambda rref: rref.owner_id == here)
        with _outside_contexts():
            for rref in ordered[:-1]:
                futures.append((rref.owner_id, worker.rpc_async(rref.owner_id, step_of, (*rref.id, context_id))))
            for rref in ordered[-1:]:
                futures.append((rref.owner_id, _Done(worker, rref, context_id)))
            _all_results(worker, "the optimizer could not step", futures)


def make_local_optimizer(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: Sequence[_Group],
    grouped: bool,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> RRef[LocalOptimizer]:
    """Create an owner's part, on the owner."""
    values = [(options, [rref.local_value() for rref in rrefs], names) for options, rrefs, names in groups]
    return RRef(LocalOptimizer(_worker(), optimizer_class, values, grouped, args, kwargs))


def step_of(created_on: int, local_id: int, context_id: int) -> None:
    """Step the part of a reference, on its owner. The caller holds the reference.

    The arguments are plain numbers because calls with a reference would take the slow path.
    """
    worker = _worker()
    local: LocalOptimizer = worker.references.owned(RRefId(created_on, local_id)).get()
    timeout = remaining(worker.calls.default_timeout, current.get())
    local.step(context_id, timeout=timeout / 1e9 if timeout else -1.0)


class _Done:
    """Completed step of this thread, with a future's `wait`."""

    def __init__(self, worker: Worker, rref: RRef[LocalOptimizer], context_id: int) -> None:
        self._error: Exception | None = None
        try:
            if rref.is_owner():
                step_of(*rref.id, context_id)
            else:
                worker.rpc_sync(rref.owner_id, step_of, (*rref.id, context_id))
        except Exception as e:
            self._error = e

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


def _worker() -> Worker:
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    return worker


def _all_results(worker: Worker, what: str, futures: Sequence[tuple[int, Any]]) -> list[Any]:
    """Wait for all futures and return their results.

    Raises:
        errors of the futures, combined.
    """
    results, failures = [], []
    for owner, future in futures:
        try:
            results.append(future.wait())
        except Exception as e:
            failures.append((worker.members.name_of(owner), e))
    if failures:
        raise all_of(what, failures)
    return results


@contextmanager
def _outside_contexts() -> Iterator[None]:
    """Make calls without the current context: they belong to no forward pass."""
    scope = current.get()
    if scope is None or scope.autograd is None:
        yield
        return
    token = current.set(scope._replace(autograd=None))
    try:
        yield
    finally:
        current.reset(token)


def _group(entry: object) -> _Group:
    if not isinstance(entry, Mapping) or "params" not in entry:
        raise TypeError(f'a parameter group is a dict with "params", not {entry!r}')
    params = entry["params"]
    members = [params] if isinstance(params, RRef) else list(params)
    return {key: value for key, value in entry.items() if key != "params"}, *_split(members)


def _split(members: Sequence[Any]) -> tuple[list[RRef[Any]], list[str] | None]:
    """Return the references, and their names if they have any."""
    names: list[str] | None = None
    if members and isinstance(members[0], tuple):
        names = [name for name, _ in members]
        members = [rref for _, rref in members]
    for member in members:
        if not isinstance(member, RRef):
            raise TypeError(
                f"DistributedOptimizer takes RRefs to parameters, but got a {type(member).__name__}. For a parameter of"
                " this worker, pass RRef(parameter)."
            )
    return list(members), names


def _part_of(group: _Group, owner: int) -> _Group | None:
    """Return one owner's part of a group; None if it has none."""
    options, rrefs, names = group
    mine = [index for index, rref in enumerate(rrefs) if rref.owner_id == owner]
    if not mine:
        return None
    return options, [rrefs[i] for i in mine], None if names is None else [names[i] for i in mine]
