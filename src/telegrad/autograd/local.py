"""The local graph of one pass: made when it is first needed, and let go of as soon as nothing more can come.

The schedule and the pass both look at it, and it knows neither: what a pass leaves behind goes with its last user, and
nothing waits for the cycle collector.
"""

from collections.abc import Sequence

from torch.autograd.graph import GradientEdge

from telegrad.autograd.context import Context, Received, Sent
from telegrad.autograd.graph import LocalGraph
from telegrad.autograd.recording import edges_of
from telegrad.autograd.stages import Stages
from telegrad.protocols.backward import UnknownSend
from telegrad.protocols.backward_messages import ROOT, Layout

__all__ = ["Local"]


class Local:
    """The stages of what was recorded in a context, once somebody asks for them.

    Args:
        context: what was recorded here.
    """

    __slots__ = ("_closed", "_context", "_retain_graph", "_stages", "recorded", "roots")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stages: Stages | None = None
        self._retain_graph = False
        self._closed = False
        self.roots: Sequence[GradientEdge] | None = None  # at the root of the pass
        self.recorded: tuple[list[Sent], list[Received]] | None = None  # if not all that the context has now

    @property
    def held(self) -> bool:
        """Is the graph held for the pass?"""
        return self._stages is not None

    @property
    def retain_graph(self) -> bool:
        """Is the graph to be kept when it has run? Set it whenever it is heard of: a mark may come first."""
        return self._retain_graph

    @retain_graph.setter
    def retain_graph(self, retain: bool) -> None:
        self._retain_graph = retain
        if self._stages is not None:
            self._stages.retain_graph = retain

    def stages(self) -> Stages:
        """The stages.

        Raises:
            UnknownSend: they are over.
        """
        if self._stages is None:
            self._stages = self._make()
        return self._stages

    def _make(self) -> Stages:
        if self._closed:
            raise UnknownSend(-1, "had all the gradients that it can get")
        if self.recorded is not None:
            sends, receipts = self.recorded
        else:
            with self._context.lock:
                sends = list(self._context.sends.values())
                receipts = list(self._context.receipts.values())
        sends.sort(key=_by_id)
        sources: list[tuple[int, Sequence[GradientEdge | None]]] = [(sent.id, edges_of(sent)) for sent in sends]
        if self.roots is not None:
            sources.insert(0, (ROOT, self.roots))
        stages = Stages(self._context, LocalGraph(sources, receipts))
        stages.retain_graph = self._retain_graph
        return stages

    def layout(self) -> Layout:
        """What the schedule needs to know of the graph."""
        return self.stages().graph.layout()

    def pending(self) -> bool:
        """Are there gradients that only the last stage would take up?"""
        return self._stages is not None and self._stages.pending()

    def close(self) -> None:
        """Nothing more can come."""
        self._closed = True
        self._stages = self.roots = self.recorded = None


def _by_id(sent: Sent) -> int:
    return sent.id
