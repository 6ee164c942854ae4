"""Stages of a pass without a context, which walks the graph in subgraphs.

The plain context of a worker has the messages of all trainers. A pass walks a *subgraph* when a gradient or a mark
arrives for one of its messages. The subgraph begins at the messages of a component (`components.py`), and at those that
reach the same leaves with hooks or under DistributedDataParallel. Subgraphs share no nodes, so each has a `StageRunner`
of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from telegrad.autograd.ddp import reduced_with
from telegrad.autograd.execution.stages import Reports, StageRunner
from telegrad.autograd.graph.local_graph import LocalGraph, has_hooks
from telegrad.protocols.backward import UnknownSend
from telegrad.protocols.backward_messages import FINAL, ROOT, Group, Layout

if TYPE_CHECKING:
    from torch import Tensor

    from telegrad.autograd.context import Entry
    from telegrad.autograd.execution.wanted import Wanted
    from telegrad.autograd.plain.records import PlainContext

__all__ = ["PlainStages"]

MEETS = (
    "shares nodes with messages of the same backward pass, which have run already: the message was sent after the pass"
    " began, or an earlier pass without retain_graph=True has run its graph"
)


class _Subgraph:
    """A subgraph, with the numbers of its first source and group in the schedule."""

    __slots__ = ("first_group", "first_source", "layout", "runner")

    def __init__(self, runner: StageRunner, layout: Layout, first_source: int, first_group: int) -> None:
        self.runner = runner
        self.layout = layout
        self.first_source = first_source
        self.first_group = first_group


class PlainStages:
    """Runs the stages of one pass at one worker, like `StageRunner`.

    One thread at a time.

    Args:
        context: The plain context of the worker.
    """

    __slots__ = (
        *("_context", "_discards", "_groups", "_meeting", "_open_subgraphs", "_subgraph_of", "_subgraphs", "_reported"),
        *("_retain_graph", "_wanted"),
    )

    def __init__(self, context: PlainContext) -> None:
        self._context = context
        self._subgraphs: list[_Subgraph] = []
        self._subgraph_of: dict[int, _Subgraph] = {}  # source ->
        self._groups: list[_Subgraph] = []  # by number
        self._reported = 0  # number of subgraphs that the schedule has
        self._open_subgraphs: list[_Subgraph] = []  # not released
        self._meeting: list[_Subgraph] = []  # of several sources
        self._retain_graph = False
        self._discards = False
        self._wanted: Wanted | None = None

    @property
    def retain_graph(self) -> bool:
        """Whether torch keeps the graph after it has run."""
        return self._retain_graph

    @retain_graph.setter
    def retain_graph(self, retain_graph: bool) -> None:
        if retain_graph == self._retain_graph:
            return
        self._retain_graph = retain_graph
        for subgraph in self._subgraphs:
            subgraph.runner.retain_graph = retain_graph

    def discard_leaves(self, wanted: Wanted | None = None) -> None:
        """Leave `.grad` of leaves as it is; see `StageRunner.discard_leaves`."""
        if not self._discards:
            self._discards, self._wanted = True, wanted
            for subgraph in self._subgraphs:
                subgraph.runner.discard_leaves(wanted)

    # ---- the subgraphs

    def open(self, roots: Sequence[Entry] = (), sends: Sequence[int] = (), alone_with: int | None = None) -> LocalGraph:
        """Walk the subgraphs of these roots and sends, and return the last one.

        Args:
            roots: At the root of the pass, the arguments of `backward`.
            sends: Sends that get gradients or marks.
            alone_with: The sender of the gradients of the only send, if this sender will send no others in the
                pass, and other workers send gradients only if this send leads to them.

        Raises:
            UnknownSend: There is no such record, its subgraph has been released, or it shares nodes with one that the
                pass has walked.
        """
        subgraph = self._open_roots(roots) if roots else None
        for send in sends:
            subgraph = self._subgraph_of.get(send) or self._open_send(send, alone_with)
        assert subgraph is not None
        return subgraph.runner.open()

    def _open_roots(self, roots: Sequence[Entry]) -> _Subgraph:
        graph = LocalGraph(roots, [], (), self._context.find_received)
        self._complete(graph, set())
        return self._add(graph, roots)

    def _open_send(self, send: int, alone_with: int | None = None) -> _Subgraph:
        context = self._context
        graph = LocalGraph((), [], (), context.find_received)
        if alone_with is not None:  # does it lead to no other worker?
            graph.extend(context.find_sent((send,)))
            if graph.leads_back(send, alone_with):
                return self._add(graph)
        messages = context.components.of(send)
        if not messages:
            raise UnknownSend(send, "no record at this worker, or was sent after backward began")
        self._complete(graph, set(messages))
        return self._add(graph)

    def _complete(self, graph: LocalGraph, messages: set[int]) -> None:
        """Walk on until a subgraph has these messages, and all others that belong to it."""
        known = set(graph.bits)
        while True:
            new = messages - known
            if new:
                conflict = new & self._subgraph_of.keys()
                if conflict:
                    raise UnknownSend(min(conflict), MEETS)
                graph.extend(self._context.find_sent(new))
                known |= new
            messages = self._sharing(graph.leaves)
            if ROOT in known and graph.walk is not None:
                messages |= self._context.components.met_by(graph.walk)
            if messages <= known:
                return

    def _sharing(self, leaves: Sequence[Tensor]) -> set[int]:
        """Return the messages that reach the same leaves, if these must get the sum.

        Without those whose graph an earlier pass has run.
        """
        sums = {id(leaf) for leaf in leaves if has_hooks(leaf) or getattr(leaf, "_post_accumulate_grad_hooks", None)}
        sums.update(reduced_with(leaves))
        if not sums:
            return sums
        consumed = self._context.consumed
        components = self._context.components
        return {
            message for message in components.sharing(sums) if message not in consumed or message in self._subgraph_of
        }

    def _add(self, graph: LocalGraph, roots: Sequence[Entry] = ()) -> _Subgraph:
        if graph.is_disjoint:
            graph.walk = None
        runner = StageRunner(self._context)
        runner.retain_graph = self._retain_graph
        if self._discards:
            runner.discard_leaves(self._wanted)
        runner.open(roots, graph=graph)
        subgraph = _Subgraph(runner, graph.layout(), len(self._subgraph_of), len(self._groups))
        self._subgraphs.append(subgraph)
        self._open_subgraphs.append(subgraph)
        if len(graph.bits) > 1:
            self._meeting.append(subgraph)
        for source in graph.bits:
            self._subgraph_of[source] = subgraph
        self._groups += [subgraph] * len(subgraph.layout.groups)
        return subgraph

    def close(self) -> None:
        """Release the subgraphs that have been walked; further ones may follow."""
        for subgraph in self._open_subgraphs:
            subgraph.runner.close()
        self._open_subgraphs.clear()
        self._meeting.clear()

    @property
    def holds_graph(self) -> bool:
        """Whether a subgraph has not been released."""
        return bool(self._open_subgraphs)

    # ---- the fast path

    @property
    def is_alone(self) -> bool:
        """At the root: whether nothing that this worker has sent leads to another worker."""
        return not self._context.components.lead_on

    def open_ends(self, sends: Sequence[int]) -> dict[int, int] | None:
        """Return the stages of sends; None if one shares nodes or leads on."""
        found: dict[int, int] = {}
        for send in sends:
            graph = self.open(sends=(send,))
            if len(graph.bits) > 1 or graph.final.recvs:
                return None
            found[send] = self._subgraph_of[send].first_group
        return found

    # ---- the schedule

    def layout(self, sends: Sequence[int] = ()) -> Layout:
        """Return the subgraphs that are new to the schedule, with those of these sends."""
        for send in sends:
            if send not in self._subgraph_of:
                self._open_send(send)
        subgraphs, self._reported = self._subgraphs[self._reported :], len(self._subgraphs)
        sources: dict[int, int] = {}
        groups: list[Group] = []
        for subgraph in subgraphs:
            for source, bit in subgraph.layout.sources.items():
                sources[source] = subgraph.first_source + bit
            for group in subgraph.layout.groups:
                groups.append(Group(group.mask << subgraph.first_source, group.recvs))
        return Layout(sources, groups, ())

    def pending(self) -> bool:
        """Return whether gradients wait for the final stage."""
        return any(subgraph.runner.pending() for subgraph in self._meeting)

    def add(self, source: int, grads: Iterable[Tensor | None]) -> None:
        """Add the gradients of a source; see `StageRunner.add`."""
        subgraph = self._subgraph_of.get(source) or self._open_send(source)
        subgraph.runner.add(source, grads)
        if not self._retain_graph:
            self._context.consume(source)

    def run(self, group: int) -> Reports:
        """Run the stage of a group, or FINAL; see `StageRunner.run`."""
        if group != FINAL:
            subgraph = self._groups[group]
            return subgraph.runner.run(group - subgraph.first_group)
        for subgraph in self._meeting:
            if subgraph.runner.pending():
                subgraph.runner.run(FINAL)
        return []
