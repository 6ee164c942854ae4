"""Optimizer of parameters on many workers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from telegrad.autograd.api import _is_valid_context
from telegrad.errors import RemoteError, UnknownWorker, WorkerLost
from telegrad.optim import owner as on_owner
from telegrad.optim.ask import Request, ask, check_thread, failures_of
from telegrad.optim.groups import Part, keep_tensors, part_of, read_group, read_groups, tensors_of
from telegrad.optim.local import LocalOptimizer
from telegrad.optim.owner import RemoteGroup, require_worker, step_of
from telegrad.optim.state import check_groups, check_shapes, join, split
from telegrad.rref import RRef
from telegrad.types import WorkerInfo
from telegrad.worker.scope import current_chain

__all__ = ["DistributedOptimizer"]

Closure = Callable[[], Any]


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizer that steps parameters on their workers.

    Each owner of parameters gets its own ordinary optimizer. A step runs on all owners at the same time. Any number of
    trainers may have optimizers of the same parameters, and step them while others run forward and backward passes;
    see ``docs/optim.md`` for the values that each of them sees.

    It is a ``torch.optim.Optimizer``, so learning rate schedulers and hooks of torch work with it. Options that a
    program or a scheduler sets in `param_groups` are sent to the owners with the next step, in the same message.

    Args:
        optimizer_class: any class of ``torch.optim``, or another with its interface: called on each owner with that
            owner's parameters and the further arguments.
        params_rref: `RRef`s to leaf tensors on any worker; or pairs of a name and such an `RRef`; or groups: dicts with
            these as "params" and with options of the group as other items.
        args, kwargs: further arguments of the class, sent to each owner.

    Attributes:
        param_groups: the groups: dicts with the references as "params", in the given order, and with all options.
        defaults: the options that groups have by default.

    Raises:
        RuntimeError: this process has not joined a group, or an owner is lost.
        ValueError: params_rref is empty, or only some of a group's parameters have names.
        TypeError: params_rref is none of the above; the class has a `step` that needs a closure.
        errors of the class; those of several owners as one `ExceptionGroup` that is of all their types.

    Example::

        module = RemoteModule("worker1/cpu", torch.nn.Linear, (20, 1))
        optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        with autograd.context() as context_id:
            loss = module(torch.ones(8, 20)).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        scheduler.step()
    """

    _unscaling = ""  # attempt to unscale the gradients, while it has not succeeded

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: object,
        **kwargs: object,
    ) -> None:
        require_worker()
        groups, grouped = read_groups(list(params_rref))
        self.optimizer_class: Callable[..., torch.optim.Optimizer] = optimizer_class
        self._arguments = args, kwargs
        self._parts: dict[int, Part] = {}  # by owner
        self._unusable = ""  # the reason why the owners' groups are unknown
        # Not the constructor of torch's class: it takes tensors.
        self.__setstate__({"defaults": {}, "state": defaultdict(dict), "param_groups": []})
        self.defaults: dict[str, Any] = {}  # without what torch adds for states of old versions
        name = getattr(optimizer_class, "__name__", optimizer_class)
        self._add_groups(groups, grouped, f"DistributedOptimizer({name})")

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """References to the owners' parts."""
        return [part.rref for part in self._parts.values()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, for example of layers that begin to train.

        After an error the optimizer is unchanged, and may be used further. If an owner that is not lost cannot be made
        to remove its part of the group, a note of the error says so, and all further uses raise `RuntimeError`.

        Args:
            param_group: a dict with references, or pairs of names and references, as "params", and with options.

        Raises:
            TypeError: it is not such a group, or "params" is a set.
            ValueError: only some of the parameters have names.
            errors of the owners' optimizers; those of several owners as one `ExceptionGroup`.
        """
        self._add_groups([read_group(param_group)], True, "DistributedOptimizer.add_param_group")

    def _add_groups(self, groups: Sequence[RemoteGroup], grouped: bool, operation: str) -> None:
        self._check_usable()
        worker, (args, kwargs) = require_worker(), self._arguments
        attempt = uuid4().hex
        kind = worker.calls.name_or_function(self.optimizer_class)
        before, first = len(self.param_groups), self._count
        firsts = [first + sum(len(rrefs) for _, rrefs, _ in groups[:number]) for number in range(len(groups))]
        owners = list(dict.fromkeys(rref.owner_id for _, rrefs, _ in groups for rref in rrefs))
        mine = {one: [(n, part) for n, group in enumerate(groups) if (part := part_of(group, one))] for one in owners}

        def request(one: int) -> Request:
            theirs = [part for _, (part, _) in mine[one]]
            known = self._parts.get(one)
            if known is not None:
                return Request(on_owner.add_group, (theirs[0], attempt), known.rref)
            if one == worker.info.id:
                return Request(on_owner.create_part, (self.optimizer_class, theirs, grouped, args, kwargs))
            return Request(on_owner.make_local_optimizer, (kind, theirs, grouped, args, kwargs))

        requests = {one: request(one) for one in owners}
        check_thread(operation, owners)  # nothing is to be undone
        try:
            replies = ask(operation, requests)
        except BaseException as error:
            if known := [one for one in owners if one in self._parts]:
                self._undo_add(attempt, known)
            if self._unusable:
                error.add_note(self._unusable)
            raise
        own = tensors_of(self.optimizer_class, args, kwargs)
        found: list[dict[str, Any]] = [{} for _ in groups]
        for one, reply in zip(owners, replies, strict=True):
            if one not in self._parts:
                rref, reply = reply
                self._parts[one] = Part(rref)
            defaults, options, shapes = reply
            self.defaults.update(keep_tensors(defaults, own))
            ids = [firsts[n] + place for n, (_, places) in mine[one] for place in places]
            self._parts[one].add([before + n for n, _ in mine[one]], ids, shapes, options)
            for (n, _), of_group in zip(mine[one], options, strict=True):
                found[n].update(of_group)
        for (options, rrefs, names), of_group in zip(groups, found, strict=True):
            named = {} if names is None else {"param_names": names}
            of_group = keep_tensors(of_group, own | options)
            self.param_groups.append({"params": rrefs, **self.defaults, **options, **of_group, **named})

    def _undo_add(self, attempt: str, owners: Sequence[int]) -> None:
        """Remove the group of a failed attempt from the owners that may have added it."""
        members = require_worker().members
        self._unusable = _unusable_because([members.name_of(one) for one in owners], "was interrupted")
        failures = failures_of({one: Request(on_owner.undo_add, (attempt,), self._parts[one].rref) for one in owners})
        failed = {members.name_of(one): error for one, error in failures.items() if not _is_loss(error)}
        why = "; ".join(f"{type(error).__name__}: {error}" for error in failed.values())
        self._unusable = _unusable_because(list(failed), f"failed ({why})") if failed else ""

    def _check_usable(self) -> None:
        if self._unusable:
            raise RuntimeError(self._unusable)
        at_owners = sum(len(part.ids) for part in self._parts.values())
        if at_owners != self._count:
            raise ValueError(
                f'param_groups has {self._count} references as "params", and the owners step {at_owners} parameters.'
                " The references of a group cannot be changed: use add_param_group, or create another optimizer."
            )

    @property
    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.param_groups)

    # ---- steps

    def step(self, context_id: int | Closure | None = None, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient, on all owners at once.

        Blocks until all owners have stepped. Options that have changed in `param_groups` take effect first.

        Args:
            context_id: an autograd context that is open on this worker, for its gradients; None for the `.grad` of the
                parameters.
            closure: called once before the step, without arguments, as in torch; usually it computes the gradients.

        Returns:
            The closure's result; None without a closure.

        Raises:
            RuntimeError: "Could not find autograd context with id: ...", or an owner is lost.
            errors of the optimizers; those of several owners as one `ExceptionGroup` that is of all their types. The
                other owners have stepped.
        """
        self._check_usable()
        if callable(context_id):
            context_id, closure = None, context_id
        if context_id is not None:
            _is_valid_context(context_id)
        loss = None
        if closure is not None:
            check_thread("DistributedOptimizer.step", self._parts)
            with torch.enable_grad():
                loss = closure()
        if context_id is None:
            context_id = current_chain() or None  # the step must not wait for the handler that makes it
        self._ask_with_changes("DistributedOptimizer.step", self._parts, step_of, context_id)
        return loss

    def accumulate(self, context_id: int) -> None:
        """Add the gradients of a context to the `.grad` of the parameters.

        For several contexts per step: accumulate each, then call `step` without a context, and `zero_grad`. The
        context has no gradients of these parameters afterwards. All trainers share the `.grad` of a parameter.

        Args:
            context_id: an autograd context that is open on this worker.

        Raises:
            RuntimeError: "Could not find autograd context with id: ...", or an owner is lost.

        Example::

            module = RemoteModule("worker1/cpu", torch.nn.Linear, (20, 1))
            optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.05)
            for batch in torch.ones(4, 8, 20):
                with autograd.context() as context_id:
                    autograd.backward(context_id, [module(batch).sum() / 4])
                    optimizer.accumulate(context_id)
            optimizer.step()
            optimizer.zero_grad()
        """
        _is_valid_context(context_id)
        self._ask_parts("DistributedOptimizer.accumulate", on_owner.accumulate, context_id)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the `.grad` of all parameters on their owners.

        Gradients of contexts are not affected: each context has its own.

        Args:
            set_to_none: False sets them to zero instead.

        Raises:
            RuntimeError: an owner is lost.
        """
        self._ask_parts("DistributedOptimizer.zero_grad", on_owner.zero_grad, set_to_none)

    def _norms(self, context_id: int | None, norm_type: float) -> list[tuple[int, Tensor]]:
        """Return each gradient's norm with its parameter's id."""
        replies = self._ask_parts("clip_grad_norm_", on_owner.norms_of, context_id, norm_type)
        found = []
        for part, (numbers, norms) in zip(self._parts.values(), replies, strict=True):
            found += [(part.ids[number], norms[at]) for at, number in enumerate(numbers)]
        return found

    def _scale(self, context_id: int | None, factor: float) -> None:
        """Multiply gradients at once."""
        self._ask_parts("clip_grad_norm_", on_owner.scale, context_id, factor)

    def _unscale(self, context_id: int | None, inverse: float) -> bool:
        """Multiply gradients at once; return whether one was infinite or not a number."""
        if context_id is not None:
            _is_valid_context(context_id)
        # The same attempt until all owners have unscaled: it is repeated after an error.
        self._unscaling = self._unscaling or uuid4().hex
        arguments = context_id, inverse, self._unscaling
        found = any(self._ask_parts("GradScaler.unscale_", on_owner.unscale, *arguments))
        self._unscaling = ""
        return found

    # ---- state

    def state_dict(self, owner: str | int | WorkerInfo | None = None) -> dict[str, Any]:
        """Return the state of all owners' optimizers in torch's format.

        It has copies of all tensors, on the CPU. The ids of parameters are their places in `param_groups`. An ordinary
        optimizer of the same parameters in one process can load it.

        Args:
            owner: a worker, for the state of its part only: that of an ordinary optimizer of the parameters that it
                owns, in the order of `param_groups`.

        Raises:
            ValueError: the worker owns none of the parameters; or the class of several owners' optimizers adds entries
                of its own, which are in the state of each owner only.
            RuntimeError: an owner is lost.

        Example::

            module = RemoteModule("worker1/cpu", torch.nn.Linear, (20, 1))
            optimizer = DistributedOptimizer(torch.optim.Adam, module.remote_parameters())
            saved = optimizer.state_dict()
            DistributedOptimizer(torch.optim.Adam, module.remote_parameters()).load_state_dict(saved)
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        parts = self._parts if owner is None else self._part_on(owner)
        states = self._ask_with_changes("DistributedOptimizer.state_dict", parts, on_owner.state_of)
        result = states[0] if owner is not None else join(self.param_groups, list(parts.values()), states)
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, result) or result
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any], owner: str | int | WorkerInfo | None = None) -> None:
        """Load a state that `state_dict` or an ordinary optimizer has returned.

        The options of the groups are loaded as well. The state is checked before any owner loads a part of it. If an
        owner fails nevertheless, others may have loaded their part; the next step has the options in `param_groups`.

        Args:
            state_dict: the whole state, or one part's.
            owner: the worker whose part to load; None for all.

        Raises:
            ValueError: the state has other groups, or tensors of other shapes than the parameters; or the worker owns
                none of the parameters.
            RuntimeError: an owner is lost.
            errors of the owners' optimizers; those of several owners as one `ExceptionGroup`.
        """
        self._check_usable()
        state_dict = dict(state_dict)  # a hook may change it in place
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            result = before(self, state_dict)
            state_dict = state_dict if result is None else result
        parts = self._parts if owner is None else self._part_on(owner)
        theirs = self._split_state(state_dict, None if owner is None else parts)
        requests = {one: Request(on_owner.load_state, (theirs[one],), part.rref) for one, part in parts.items()}
        try:
            replies = ask("DistributedOptimizer.load_state_dict", requests)
        except BaseException:
            # An owner may have loaded the options of the state before its error, or that of another owner.
            for part in parts.values():
                part.mark_options_unknown()
            raise
        for part, options in zip(parts.values(), replies, strict=True):
            part.mark_sent(options)
            for number, of_group in zip(part.groups, options, strict=True):
                self.param_groups[number].update(of_group)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _split_state(
        self, state_dict: Mapping[str, Any], on: Mapping[int, Part] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Return each owner's part of a state.

        Args:
            state_dict: the whole state, or that of one owner.
            on: the part of this owner.

        Raises:
            ValueError: it has other groups, or parameters of other shapes.
        """
        if on is None:
            check_groups(self.param_groups, state_dict)
            theirs = {one: split(part, state_dict) for one, part in self._parts.items()}
        else:
            check_groups([{"params": ids} for ids in self._ids_on(*on.values())], state_dict)
            theirs = {one: dict(state_dict) for one in on}
        members = require_worker().members
        for one, state in theirs.items():
            check_shapes(self.optimizer_class, self._parts[one], state, members.name_of(one), self._name_of)
        return theirs

    def _part_on(self, owner: str | int | WorkerInfo) -> dict[int, Part]:
        members = require_worker().members
        one = members.resolve(owner).id
        if one not in self._parts:
            names = ", ".join(members.name_of(each) for each in self._parts)
            raise ValueError(f"worker {members.name_of(one)} owns no parameters of this optimizer; its owners: {names}")
        return {one: self._parts[one]}

    def _ids_on(self, part: Part) -> list[list[int]]:
        """Return the ids of a part's parameters, by group."""
        found, first = [], 0
        for number, group in enumerate(self.param_groups):
            ids = range(first, first + len(group["params"]))
            first += len(ids)
            if number in part.groups:
                found.append([one for one in part.ids if one in ids])
        return found

    def _name_of(self, parameter: int) -> str:
        """Return the name of a parameter by its id, for errors."""
        place = parameter
        for number, group in enumerate(self.param_groups):
            if place < len(group["params"]):
                names = group.get("param_names")
                return f"parameter {names[place]!r}" if names else f"parameter {place} of group {number}"
            place -= len(group["params"])
        raise IndexError(parameter)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent with the optimizer in a call: not its hooks.

        From now on either copy may set options of the owners, so each sends all of its own with its next step.
        """
        for part in self._parts.values():
            part.mark_options_unknown()
        names = ("defaults", "param_groups", "optimizer_class", "_arguments", "_parts", "_unusable")
        return {"state": defaultdict(dict), **{name: self.__dict__[name] for name in names}}

    # ---- calls of owners

    def _ask_parts(self, operation: str, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a function on all owners with their part's reference; see `ask`."""
        self._check_usable()
        return ask(operation, {one: Request(function, arguments, part.rref) for one, part in self._parts.items()})

    def _ask_with_changes(
        self, operation: str, parts: Mapping[int, Part], function: Callable[..., Any], *arguments: object
    ) -> list[Any]:
        """Call a function on owners, which first set changed options.

        See `ask`.
        """
        self._check_usable()
        changes = {one: part.changes(self.param_groups) for one, part in parts.items()}
        requests: dict[int, Request] = {}
        for one, part in parts.items():
            further = (changes[one],) if changes[one] else ()
            requests[one] = Request(function, (*arguments, *further), part.rref)
        try:
            results = ask(operation, requests)
        except BaseException:
            # An owner may have set the options before its error.
            for one, part in parts.items():
                part.mark_changes_unknown(changes[one])
            raise
        for one, part in parts.items():
            part.mark_changes_sent(changes[one])
        return results


def _is_loss(error: Exception) -> bool:
    """Return whether an owner is lost: each further call of the owner reports that."""
    return isinstance(error, (WorkerLost, UnknownWorker)) and not isinstance(error, RemoteError)


def _unusable_because(owners: Sequence[str], why: str) -> str:
    """Return the error text of an optimizer with owners that may have a failed group."""
    return (
        f"this optimizer can no longer be used: add_param_group failed, and removing the group again from worker"
        f" {', '.join(owners)} {why}. Create another optimizer of the same parameters, and load the last state."
    )
