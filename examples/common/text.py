"""Real text on every machine: the documentation of Python and four libraries."""

import ast
import math
import random
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from zlib import crc32

import torch
from torch import Tensor

LIBRARIES = ("python", "torch", "numpy", "matplotlib", "sklearn")
GIVEAWAYS = {*LIBRARIES, "pytorch", "np", "mpl", "pyplot", "plt", "scikit"}
OTHERS = {"test", "tests", "testing", "_internal", "site-packages", "_vendor", "lib2to3", "idlelib"}  # folders


def help_texts(vocabulary: int, batch: int, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Return Python's help topics as word numbers, for training and held out.

    Both have the shape `[time, batch]`; a tenth of each topic is held out. The columns are consecutive parts of the
    text. 0 stands for the words that are not among the `vocabulary - 1` most frequent ones. `limit` is the maximum
    number of words per column.
    """
    texts = [re.findall(r"[a-z]+|[^\sa-z]", text.lower()) for text in topics.values()]
    frequent = Counter(word for text in texts for word in text).most_common(vocabulary - 1)
    number = {word: i for i, (word, _) in enumerate(frequent, 1)}
    training: list[int] = []
    held_out: list[int] = []
    for text in texts:
        numbers = [number.get(word, 0) for word in text]
        training += numbers[: len(text) * 9 // 10]
        held_out += numbers[len(text) * 9 // 10 :]
    first, second = (_columns(numbers, batch)[:limit] for numbers in (training, held_out))
    return first, second


def _columns(numbers: list[int], batch: int) -> Tensor:
    height = len(numbers) // batch
    return torch.tensor(numbers[: height * batch]).view(batch, height).t().contiguous()


def guess(training: Tensor, held_out: Tensor, vocabulary: int) -> float:
    """Return the perplexity on `held_out` of a model that only knows word frequencies.

    The frequencies are those of `training`, with each count increased by one.
    """
    counts = training.flatten().bincount(minlength=vocabulary) + 1
    return math.exp(-(counts / counts.sum()).log()[held_out[1:]].mean().item())


Document = tuple[list[int], int]
"""The hashed words of a text, and the index of its library in `LIBRARIES`."""


def docstrings(buckets: int, files: int) -> tuple[list[Document], list[Document]]:
    """Return docstrings of each library, for training and held out.

    They are from up to `files` files of each library; every fifth file is held out. A word stands for the bucket, of
    `buckets`, of its CRC. The libraries' names are left out, so that only the content identifies a library.
    """
    training: list[Document] = []
    held_out: list[Document] = []
    for library, name in enumerate(LIBRARIES):
        for i, text in enumerate(_sources(name)[:files]):
            documents: list[Document] = []
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    words = re.findall(r"[a-z]+", (ast.get_docstring(node) or "").lower())[:100]
                    hashed = [crc32(word.encode()) % buckets for word in words if word not in GIVEAWAYS]
                    if len(hashed) >= 10:
                        documents.append((hashed, library))
            (held_out if i % 5 == 0 else training).extend(documents[:20])  # no file may outweigh all others
    return training, held_out


def _sources(library: str) -> list[str]:
    """Return the texts of a library's modules, in a random order fixed for all runs."""
    spec = find_spec("ast" if library == "python" else library)
    assert spec is not None
    assert spec.origin is not None
    home = Path(spec.origin).parent
    files = [file for file in sorted(home.rglob("*.py")) if not OTHERS & set(file.relative_to(home).parts)]
    random.Random(0).shuffle(files)
    return [file.read_text(encoding="utf-8") for file in files]
