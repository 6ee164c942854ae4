"""Rules of STYLE.md that a program checks: words, pronouns, docstrings.

The rules are data. A key of `REPLACEMENTS` is a regular expression of whole words; its value says what to write
instead. A space in a key also matches `_` and the border between the words of a CamelCase name, so that prose and
identifiers are checked alike. `NAMES` are checked in code only.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

PRONOUNS = "who|whom|whose|whoever|nobody|somebody|everybody|anybody|someone|anyone|everyone|themselves|himself|herself"
PRONOUNS_PER_1000 = {"code": 1.0, "documents": 5.0}

FIRST_LINE = 80  # characters
BAD_FIRST_WORDS = "What|Which|Why|Who|Whoever|It|They|The same|As|One|All|Those|So|Nor|Else"
BAD_FIRST_WORDS_OF_CORE = f"{BAD_FIRST_WORDS}|Hands|Notes|However|Says|Sees|Tells|Brings"

REPLACEMENTS = {
    "short way|short path|goes short": "fast path",
    "long way|general way|at length": "slow path",
    "whoever": "the caller, the peer, the thread ...",
    "(comes?|came|coming|brought|goes|went|go|sent|sends?) home": "return, returned, zero-copy return",
    "time-?outs? of some|time-outs?": "timeout",
    "in place of": "instead of",
    "anew|afresh": "again",
    r"some \d[\d,.]* (s|ms|us|seconds|MB|KB|GB)": "about 3 s",
    "(?:is|are|was|were|be|been|being) told": "is notified of",
    "let(s|ting)? go": "release",
    "bury|buries|buried": "mark_closed",
    "doors?": "listener, accept",
    "commons": "multicast buffer, MulticastArena",
    "polling role|role of polling|who polls|holds? the role": "leader",
    "glances?": "poll, check",
    "nudge[sd]?|nudging": "request_callback, notify",
    "doorbells?": "wake-up fd",
    "timekeeper": "timer thread",
    "strangers?": "unauthenticated connection",
    "liars?": "malicious peer",
    "in vain": "without effect, wasted",
    "beside": "alongside, next to",
    "by itself": "on its own",
    "lies|lay": "resides, is in",
    "stands? in": "is in",
    "in hand": "is processing",
    "so many": "the given number of",
    "(has|have|had|take|takes|took|without) a look": "check",
    "looks? at": "check, read, inspect",
    "the word that": "the notification that",
    "surroundings": "PythonEnv",
    "unhurried": "MIN_FAST_TIMEOUT",
    "without a word": "without output, without an error",
    "keeps? quiet": "sends nothing",
    "culprits?": "the value that cannot be pickled",
    "behaviours?|colours?|neighbours?|favour\\w*|honour\\w*|centre[ds]?": "American spelling: behavior, color",
    "(serial|optim|initial|recogn|organ|synchron|normal|final|character|general)is(e[ds]?|ing|ation\\w*)": (
        "American spelling: serialize, optimize"
    ),
}
"""Words of prose and identifiers."""

NAMES = {
    "PlainCalls|PlainPool|Unusual|NotMade|NotYet|EndedEngine|Footprint": "the name in GLOSSARY.md",
    "_?linger|MAY_LINGER|_?cookies?": "keep-alive, MUST_DELIVER; completion target",
    "_?outcomes?": "completion, result, status",
    "assert_nothing_left|let_go_of_frames": "assert_quiescent, clear_frames",
}
"""Words of identifiers only: in prose they may mean something else."""

OLD_WORDS = """
    vain credo preamble passage departure recorder scattered loan borrower bell forest island draining
    lane_choice holding_up take_role run_to_the_ends goes_to_the_ends only_recvs accumulate_beside
    tell_collectors take_lazy hurry_lazy put_to_sleep fall_asleep release_gathered forget_dead wait_until_gone
    suit_path begin_unpaced spin_once taking_turns answer_later let_go_of_frames
""".split()  # noqa: SIM905
"""Old words of the code, without any other use: in prose, as names, and as parts of names, in any spelling."""

OLD_NAMES = """
    Addressed Answered Asked Commons Crossing Direct Door Draining EndedEngine Footprint GilUntilBlocked InContext
    Interruption KnownField LaneChoice Lent Managed Outcome Passing Reaching Scoped Scopes StepState Surroundings
    WakesForReferences Words _Guest _Held _Nobody _Patience _Stepped ALONE_IN_TUPLE GREETING NOT_MADE NO_DEVICES
    _LAST_WORD _MORE _NOT_HERE _PATIENCE _UNHURRIED kAmongFirst kFarPast kGrace kMostGrace kMuch kPiece kScattered
    kSlice kTogether kTrim _as_torch_says _at_length _being_written _call_at_length _passing _plant _relieve
    _sent_short _subject _tell_when_done comes_later creation_over in_one_order is_usual part_from _under_way
    any_loans any_reduced awake_ give_loans handler_run hold_up hot_ is_forest is_home item_tuple join_lane
    leave_beside left_open log_refusal make_directly may_walk news_ not_spawned on_oneway on_outcome outcome_tuple
    own_memory pass_by passes_over peer_user run_jobs run_method stay_awake take_back telling_ to_begin unasked
    widened_ with_report
""".split()  # noqa: SIM905
"""Old names of the code, as identifiers. Their words have other uses."""

_BORDERS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")
_GAP = r"(?:\s+(?:(?:#|///?|\*)\s*)?)"  # between two words, which may stand on two lines of a comment
_PATTERNS = [
    (re.compile(rf"\b(?:{key.replace(' ', _GAP)})\b", re.IGNORECASE), instead) for key, instead in REPLACEMENTS.items()
]
_PATTERNS.append(
    (
        re.compile(rf"\b(?:{'|'.join(word.replace('_', _GAP) for word in OLD_WORDS)})s?\b", re.IGNORECASE),
        "the word of GLOSSARY.md",
    )
)
_NAMES = [(re.compile(rf"(?<!\w)(?:{key})(?!\w)"), instead) for key, instead in NAMES.items()]
_NAMES.append((re.compile(rf"(?<!\w)(?:{'|'.join(OLD_NAMES)})(?!\w)"), "the name of GLOSSARY.md, or of the field"))
_PRONOUNS = re.compile(rf"\b(?:{PRONOUNS})\b", re.IGNORECASE)
_BAD_FIRST_WORDS = re.compile(rf"(?:{BAD_FIRST_WORDS})\b")
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*///.*\n)+", re.MULTILINE)
_BAD_COMMENT = re.compile(rf"[ \t]*///\s*({BAD_FIRST_WORDS_OF_CORE})\b")
_BAD_BINDING_DOCSTRING = re.compile(rf',\s*"({BAD_FIRST_WORDS_OF_CORE})\b')


@dataclass(frozen=True)
class Breach:
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.line}: {self.found!r}; write: {self.instead}"


def split_names(text: str) -> str:
    """Split identifiers into words; lines stay the same."""
    return _BORDERS.sub(" ", text)


def word_breaches(text: str, *, code: bool) -> list[Breach]:
    """Return the banned words of a file, those of `NAMES` in code only."""
    words = split_names(text)
    found = [
        Breach(words.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead)
        for pattern, instead in _PATTERNS
        for match in pattern.finditer(words)
    ]
    if code:
        found += [
            Breach(text.count("\n", 0, match.start()) + 1, match[0], instead)
            for pattern, instead in _NAMES
            for match in pattern.finditer(text)
        ]
    return sorted(found, key=lambda breach: breach.line)


def pronouns(text: str) -> list[Breach]:
    """Return the personal pronouns of a file."""
    return [
        Breach(number, match[0], "the caller, the peer, no thread ...")
        for number, line in enumerate(split_names(text).splitlines(), 1)
        for match in _PRONOUNS.finditer(line)
    ]


def docstring_breaches(source: str) -> list[Breach]:
    """Return docstrings with a first line that is too long or begins wrongly."""
    return [breach for node in ast.walk(ast.parse(source)) for breach in _docstring_breaches(node)]


def _docstring_breaches(node: ast.AST) -> Iterator[Breach]:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    lines = (ast.get_docstring(node) or "").splitlines()
    if not lines:
        return
    number = node.body[0].lineno
    if len(lines[0]) > FIRST_LINE:
        yield Breach(number, lines[0], f"a first line of at most {FIRST_LINE} characters")
    if bad := _BAD_FIRST_WORDS.match(lines[0]):
        yield Breach(number, bad[0], "what the function does (imperative), or what the class is (noun)")


def core_comment_breaches(source: str) -> list[Breach]:
    """Return `///` comments of declarations, and docstrings of bindings, that begin wrongly."""
    bad = [bad for block in _COMMENT_BLOCK.finditer(source) if (bad := _BAD_COMMENT.match(source, block.start()))]
    bad += _BAD_BINDING_DOCSTRING.finditer(source)
    return [
        Breach(source.count("\n", 0, match.start(1)) + 1, match[1], "what the function does, or what the class is")
        for match in sorted(bad, key=lambda match: match.start(1))
    ]
