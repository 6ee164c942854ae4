"""Progress bars, by whichever package is installed."""

from collections.abc import Callable, Generator, Iterable
from importlib import import_module
from typing import Any, TypeAlias

__all__ = ["find_bar"]

Bar: TypeAlias = Callable[[Generator[Any, None, None], int | None], Generator[Any, None, None]]


def find_bar() -> Bar:
    """Return a function of a generator and its length that shows the progress.

    Raises:
        ImportError: Neither rich nor tqdm is installed.
    """
    try:
        return _bar_of(import_module("rich.progress").track, "description")
    except ImportError:
        pass
    try:
        return _bar_of(import_module("tqdm").tqdm, "desc")
    except ImportError:
        raise ImportError(
            "rpc.map cannot show its progress: neither rich nor tqdm is installed. Run `pip install rich` (or tqdm), or"
            " leave out progress=True."
        ) from None


def _bar_of(track: Callable[..., Iterable[Any]], description: str) -> Bar:
    def bar(results: Generator[Any, None, None], total: int | None) -> Generator[Any, None, None]:
        try:
            yield from track(results, **{description: "rpc.map", "total": total})
        finally:
            results.close()

    return bar
