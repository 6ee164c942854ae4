"""Check that the subject of a commit is `area: imperative summary`.

A hook of .pre-commit-config.yaml runs it: python tools/commit_message.py FILE. `make lint` checks all commits since
`BASE`: python tools/commit_message.py --history. Without the history up to there, that checks nothing.
"""

import re
import subprocess
import sys
from pathlib import Path

BASE = "79024b855acef94ce4bcfae2d5dd4accc6f5eca7"  # older commits may break the rule
LONGEST = 72  # characters
SUBJECT = re.compile(r"(?P<area>[a-z][a-z0-9_.-]*): (?P<verb>[a-z][a-z-]*)\b")
PASSED_ON = re.compile(r"(fixup|squash|amend)! |Merge |Revert \"")  # written by git
NO_IMPERATIVE = re.compile(
    r"(a|an|the|it|its|what|how|when|if|this|these|no|all|each|every|both|some|any|one|for|in|at|on|of|with"
    r"|\w+(ing|ed)|\w*[^us'\W]s)$"
)
IMPERATIVE = {"bring", "embed", "feed", "need", "seed", "shed", "speed", "string", "bias", "alias"}


def fault(message: str) -> str | None:
    """Return the error of the subject of a commit message; None if it has none."""
    subject = message.partition("\n")[0]
    if PASSED_ON.match(subject):
        return None
    if len(subject) > LONGEST:
        return f"the subject has {len(subject)} characters; at most {LONGEST}"
    found = SUBJECT.match(subject)
    if found is None:
        return "the subject must be `area: imperative summary`, as in `shm: return chunks in batches`"
    if found["verb"] not in IMPERATIVE and NO_IMPERATIVE.match(found["verb"]):
        return f"{found['verb']!r} is no imperative"
    if subject.endswith("."):
        return "the subject ends without a period"
    return None


def bad_subjects(folder: Path, base: str = BASE) -> list[str]:
    """Return the commits with a bad subject since `base`, and their errors.

    There are none if `base` is not in the history: the folder is no repository, its clone is shallow, or it is an
    older state.
    """
    git = ["git", "-C", str(folder)]
    known = subprocess.run([*git, "merge-base", "--is-ancestor", base, "HEAD"], capture_output=True, check=False)
    if known.returncode != 0:
        return []
    command = [*git, "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    commits = [line.split(" ", 1) for line in listed.splitlines()]
    return [f"{commit} {subject!r}: {wrong}" for commit, subject in commits if (wrong := fault(subject))]


if __name__ == "__main__":
    if sys.argv[1:] == ["--history"]:
        bad = bad_subjects(Path(__file__).parents[1])
        sys.exit("\n".join(["subjects of commits (STYLE.md, rule 20):", *bad]) if bad else 0)
    if wrong := fault(Path(sys.argv[1]).read_text()):
        sys.exit(f"commit message: {wrong} (STYLE.md, rule 20)")
