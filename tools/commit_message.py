"""Check that the subject of a commit is `area: imperative summary`.

A hook of .pre-commit-config.yaml runs it: python tools/commit_message.py FILE.
"""

import re
import sys
from pathlib import Path

LONGEST = 72  # characters
SUBJECT = re.compile(r"(?P<area>[a-z][a-z0-9_.-]*): (?P<verb>[a-z][a-z-]*)\b")
PASSED_ON = re.compile(r"(fixup|squash|amend)! |Merge |Revert \"")  # written by git
NO_IMPERATIVE = re.compile(r"(a|an|the|it|what|this|these|no|all|\w+(ing|ed)|\w*[^us'\W]s)$")
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


if __name__ == "__main__":
    if wrong := fault(Path(sys.argv[1]).read_text()):
        sys.exit(f"commit message: {wrong} (STYLE.md, rule 20)")
