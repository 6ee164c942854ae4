"""Parser of the command line of ``python``."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["NotPython", "PythonLine", "read"]

# Options of CPython 3.11 to 3.14.
_ALONE = frozenset("bBdEhiIOPqRsStuvVx?")
_WITH_ARGUMENT = frozenset("WX")
_LONG_ALONE = frozenset({"--help", "--help-all", "--help-env", "--help-xoptions", "--version"})
_LONG_WITH_ARGUMENT = "--check-hash-based-pycs"
_RUNS = {"c": "CODE", "m": "MODULE"}  # the words after one of these and its argument are the program's


class NotPython(ValueError):
    """Option that Python does not have, or that lacks its argument."""


class PythonLine(NamedTuple):
    """Parsed command line.

    Attributes:
        options: Python's own options, before the program.
        letters: the one-letter options among them.
        others: the given options that are in `others` of `read`.
        kind: kind of program: ``"c"``, ``"m"``, ``"-"`` (standard input), ``"file"``, or ``""`` if there is none.
        rest: the program and its arguments.
    """

    options: list[str]
    letters: frozenset[str]
    others: frozenset[str]
    kind: str
    rest: list[str]


def read(words: Sequence[str], others: Collection[str] = ()) -> PythonLine:
    """Parse the words after ``python``, as the interpreter does.

    Args:
        words: the words.
        others: further long options, without arguments, that may appear among Python's.

    Raises:
        NotPython: an option that Python does not have, or one without its argument.
    """
    options: list[str] = []
    letters: set[str] = set()
    found: set[str] = set()
    left = list(words)

    def line(kind: str) -> PythonLine:
        return PythonLine(options, frozenset(letters), frozenset(found), kind, left)

    def take_argument(option: str) -> None:
        if not left:
            raise NotPython(f"{option} needs an argument")
        options.append(left.pop(0))

    while left:
        word = left[0]
        if word == "-" or not word.startswith("-"):
            return line("-" if word == "-" else "file")
        del left[0]
        if word in others:
            found.add(word)
            continue
        if word == "--":
            options.append(word)
            return line("file" if left else "")
        if word.startswith("--"):
            options.append(word)
            if word == _LONG_WITH_ARGUMENT:
                take_argument(word)
            elif word not in _LONG_ALONE:
                raise NotPython(f"there is no option {word}")
            continue
        for index, letter in enumerate(word[1:], 1):
            attached = word[index + 1 :]
            if letter in _RUNS:
                if not attached and not left:
                    raise NotPython(f"-{letter} needs an argument: -{letter} {_RUNS[letter]}")
                if index > 1:
                    options.append(word[:index])
                left.insert(0, f"-{letter}{attached}")
                return line(letter)
            if letter not in _ALONE | _WITH_ARGUMENT:
                raise NotPython(f"there is no option -{letter}")
            letters.add(letter)
            if letter in _WITH_ARGUMENT:
                options.append(word)
                if not attached:
                    take_argument(f"-{letter}")
                break
        else:
            options.append(word)
    return line("")
