"""Print what the fuzzers did, and write it as JSON.

Usage: fuzz_counts.py FOLDER SECONDS TARGETS...  Reads the logs that tools/fuzz.sh leaves in the folder.
"""

import json
import re
import sys
from pathlib import Path


def counts(log: str) -> dict[str, int]:
    """Return the inputs of a run and the edges of code that they reached."""
    executed = re.findall(r"^stat::number_of_executed_units:\s+(\d+)", log, re.MULTILINE)
    covered = re.findall(r"cov: (\d+)", log)
    # A busy machine may add "slow-unit": the input took 10 s, mostly without a processor.
    crashed = int(re.search(r"Test unit written to \S*(crash|leak|oom|timeout)-", log) is not None)
    return {
        "inputs": int(executed[-1]) if executed else 0,
        "edges": max(map(int, covered), default=0),
        "crashes": crashed,
    }


def main(folder: Path, seconds: int, targets: list[str]) -> None:
    result = {target: counts((folder / f"{target}.log").read_text(errors="replace")) for target in targets}
    for target, row in result.items():
        print(f"fuzz: {target:12} {row['inputs']:>12,} inputs  {row['edges']:>6,} edges  {row['crashes']} crashes")
    (folder / "fuzz.json").write_text(json.dumps({"seconds": seconds, "targets": result}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
