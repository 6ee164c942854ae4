"""Instructions per call: a regression test without noise.

    python -m bench.instructions            # counts, and compares with counts.json; exits with 1 if one has grown
    python -m bench.instructions --record   # writes counts.json again

Callgrind counts the executed instructions of user code, which do not depend on the load of the machine. calls.cc makes
calls through the core with one thread for caller and callee; the engine's timer, which runs more often on a slower
machine, is not counted. coding.py encodes and decodes the contents of a call.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = HERE / "counts.json"
TOLERANCE = 0.01  # share by which a count may grow; two counts of one build differ by 0.004 at most
SCHEMES = ("inproc", "shm", "unix")
CALLS = ("plain", "tensor", "async")
CODED = ("call", "reply", "containers")
COUNTED = ("--toggle-collect=counted", "--toggle-collect=telegrad::Engine::on_timer(telegrad::Lock&)")  # on, and off
REPEATED = 3  # runs with the core; work of other threads makes some count up to 0.013 more, and the lowest is taken
FEW, MANY = 1000, 21_000  # calls; the difference of two runs excludes start and end


class CannotCount(Exception):
    """The machine cannot count, or not comparably with the recorded counts.

    The text gives the reason.
    """


@dataclass(frozen=True)
class Change:
    case: str
    recorded: float
    counted: float

    @property
    def growth(self) -> float:
        return self.counted / self.recorded - 1

    def __str__(self) -> str:
        return f"{self.case}: {self.counted:,.0f} instructions, {self.recorded:,.0f} recorded ({self.growth:+.1%})"


def built_with(part: str) -> dict[str, str]:
    """Return the tools that the counts of a part depend on, apart from our sources."""
    compiler = os.environ.get("CXX", "g++").split()
    version = subprocess.run([*compiler, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout
    found = {
        "compiler": f"{Path(compiler[-1]).name} {version.strip()}",
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }
    return found | ({"python": platform.python_version()} if part == "codec" else {})


def check_possible() -> None:
    """Check that this machine can count.

    Raises:
        CannotCount: It cannot.
    """
    if shutil.which("valgrind") is None:
        raise CannotCount("valgrind is not installed (Debian: apt install valgrind)")
    if not library().exists():
        raise CannotCount(f"{library()} does not exist: run make build")


def recorded_counts(part: str) -> dict[str, float]:
    """Return the recorded counts of a part.

    Raises:
        CannotCount: They were recorded with another compiler, library or interpreter.
    """
    written = json.loads(RECORDED.read_text())[part]
    mine = built_with(part)
    differing = [
        f"{tool} {mine[tool]}, not {written['with'].get(tool)}"
        for tool in mine
        if mine[tool] != written["with"].get(tool)
    ]
    if differing:
        raise CannotCount(f"the counts of the {part} were recorded elsewhere: here is {'; '.join(differing)}")
    counts: dict[str, float] = written["instructions"]
    return counts


def library() -> Path:
    return ROOT / "build" / "dev" / "libtelegrad_core.a"


def extension() -> Path:
    return ROOT / "src" / "telegrad" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def openssl() -> list[str]:
    """Return the libraries of OpenSSL that the core was built with; none if without."""
    cache = (library().parent / "CMakeCache.txt").read_text()
    return re.findall(r"^OPENSSL_(?:SSL|CRYPTO)_LIBRARY:FILEPATH=(/.+)$", cache, re.MULTILINE)


def driver() -> Path:
    """Compile calls.cc, link it with the built core, and return the program."""
    program = ROOT / "build" / "bench" / "calls"
    program.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++").split()
    flags = ["-O2", "-std=c++20", "-pthread", "-I", str(ROOT / "csrc")]
    sources = [str(HERE / "calls.cc"), str(library()), *openssl()]
    subprocess.run([*compiler, *flags, *sources, "-o", str(program)], check=True)
    return program


def count_core() -> dict[str, float]:
    """Count the instructions of a call through the core, both ends."""
    calls = driver()
    counts = {}
    for case in CALLS:
        for scheme in SCHEMES:
            command = [*COUNTED, str(calls), case, scheme, str(FEW)]
            counts[f"{case} call over {scheme}"] = min(collected(*command) for _ in range(REPEATED)) / FEW
    return counts


def count_codec() -> dict[str, float]:
    """Count the instructions of encoding and decoding, the interpreter's included."""
    counts = {}
    for case in CODED:
        runs = [
            collected(sys.executable, "-S", "-E", str(HERE / "coding.py"), str(extension()), case, str(times))
            for times in (FEW, MANY)
        ]
        counts[f"{case} encoded and decoded"] = (runs[1] - runs[0]) / (MANY - FEW)
    return counts


PARTS: dict[str, Callable[[], dict[str, float]]] = {"core": count_core, "codec": count_codec}


def collected(*command: str) -> int:
    """Return callgrind's count for a command; it may begin with callgrind's options."""
    counting = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *command]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(counting, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"{' '.join(counting)}:\n{done.stderr[-2000:]}")
    return int(found[1])


def compare(recorded: dict[str, float], counted: dict[str, float]) -> list[Change]:
    """Compare all counted cases; a case without a record counts as unchanged."""
    return [Change(case, recorded.get(case, now), now) for case, now in counted.items()]


def record() -> None:
    """Count every case, and write counts.json."""
    content = {
        part: {"with": built_with(part), "instructions": {case: round(one, 1) for case, one in count().items()}}
        for part, count in PARTS.items()
    }
    RECORDED.write_text(json.dumps(content, indent=1) + "\n")
