"""Parsing of Python's command line."""

import subprocess
import sys

import pytest

from telegrad.cli.python_line import NotPython, read


@pytest.mark.parametrize(
    ("words", "options", "kind", "rest"),
    [
        ("", "", "", ""),
        ("-u -", "-u", "-", "-"),
        ("-uOO -X dev -Werror a.py -u", "-uOO -X dev -Werror", "file", "a.py -u"),
        ("-W error -m pytest -x", "-W error", "m", "-m pytest -x"),
        ("-mpytest -x", "", "m", "-mpytest -x"),
        ("-iBc pass -u", "-iB", "c", "-c pass -u"),
        ("-OXdev -- a.py", "-OXdev --", "file", "a.py"),
        ("--check-hash-based-pycs never --version", "--check-hash-based-pycs never --version", "", ""),
        ("--ours -u --ours a.py --ours", "-u", "file", "a.py --ours"),
    ],
)
def test_lines(words: str, options: str, kind: str, rest: str) -> None:
    line = read(words.split(), ("--ours",))
    assert (line.options, line.kind, line.rest) == (options.split(), kind, rest.split())
    assert ("--ours" in line.others) == ("--ours" in words.partition("a.py")[0])


def test_letters_are_those_of_options() -> None:
    assert read(["-uW", "S", "-XI", "-qc", "-E", "-P"]).letters == {*"uWXq"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-u --quickly a.py", "there is no option --quickly"),
        ("-uz a.py", "there is no option -z"),
        ("-u -W", "-W needs an argument"),
        ("-um", "-m needs an argument: -m MODULE"),
        ("-c", "-c needs an argument: -c CODE"),
    ],
)
def test_wrong_lines(words: str, text: str) -> None:
    with pytest.raises(NotPython) as raised:
        read(words.split())
    assert str(raised.value) == text
    python = subprocess.run([sys.executable, *words.split()], capture_output=True, text=True, check=False)
    assert python.returncode == 2, "Python takes it"
