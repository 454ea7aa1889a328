"""No code reads a sentence: it neither compares, searches, splits nor matches the text of a reason or message.

Facts are values, and only `control_plane.accounts` turns them into sentences. Code that reads a sentence changes its
behaviour when somebody rewords it, or when a person's note contains the same words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "control_plane" / "accounts"
PAGES = [path for path in sorted((ROOT / "web" / "src").rglob("*.ts*")) if path.name != "contract.ts"]
MODULES = [
    path
    for package in ("control_plane", "worker", "everstep")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.is_relative_to(ROOM)
]
TEXTS = {"failed_status_check", "message", "messages", "note", "reason", "reasons", "why", "words"}
"""Names of variables, attributes and keys that contain sentences for people."""
PARTS = {
    "count",
    "endswith",
    "find",
    "index",
    "partition",
    "removeprefix",
    "removesuffix",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
    "split",
    "splitlines",
    "startswith",
}
PATTERNS = {"findall", "finditer", "fullmatch", "match", "search", "split", "sub"}
AWS = "AWS distinguishes these cases only by a message, which the package `cloud` turns into a value"
PROCESS = "another process reports a full disk only in its output, with the system's fixed error text"
EARLIER = "an earlier release reports the cause only in this word"
ALLOWED = {
    'control_plane/cloud/aws.py: if "No active Lifecycle Action found" not in error.message:': AWS,
    'control_plane/cloud/connection.py: if code == "ValidationError" and "not found" in message.lower():': AWS,
    "control_plane/cloud/instance_batches.py: unknown = set(_INSTANCE_ID.findall(error.message))": AWS,
    "control_plane/cloud/operator.py: return process in self.suspended_processes and bool(reason) and not "
    "reason.startswith(USER_SUSPENDED)": AWS,
    "control_plane/cloud/operator.py: return _SHORTAGE.search(self.message) is not None": AWS,
    'everstep/protocol/rank_messages.py: return self.cause or (UnkeptCause.LATE if self.reason == "late" else '
    "UnkeptCause.CAPTURE)": EARLIER,
    "worker/node/full_disks.py: match = _WORDS.search(words)": PROCESS,
    "worker/node/full_disks.py: named = _NAMED.search(words)": PROCESS,
    "worker/node/full_disks.py: return _WORDS.search(words) is not None": PROCESS,
}
"""Lines that may read a text, with the reason."""


def is_text(node: ast.expr) -> bool:
    """Return whether an expression is, by its name, a sentence for people."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return not name.isupper() and name.lower().split("_")[-1] in TEXTS
        case ast.Call(func=ast.Attribute(value=value, attr="lower" | "strip" | "casefold")):
            return is_text(value)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return name.lower() in TEXTS
        case _:
            return False


def is_fixed(node: ast.expr) -> bool:
    """Return whether an expression is a text that stands in the code: a literal, or a constant."""
    match node:
        case ast.Constant(value=str(text)):
            return text != ""
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
        case _:
            return isinstance(node, ast.JoinedStr)


def name_of(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def is_reading(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> bool:
    """Return whether a comparison reads a sentence. It may ask whether a sentence is empty, or has changed."""
    match operator:
        case ast.In() | ast.NotIn():
            return is_text(right) and name_of(left) != name_of(right)
        case ast.Eq() | ast.NotEq():
            return (is_text(left) and is_fixed(right)) or (is_fixed(left) and is_text(right))
        case _:
            return False


def readings(source: str) -> Iterator[int]:
    """Yield the lines that read a sentence."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [left, *others]
                if any(is_reading(sides[at], op, sides[at + 1]) for at, op in enumerate(ops)):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in PARTS and is_text(value):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=name), args=args) if name in PATTERNS and any(map(is_text, args)):
                yield node.lineno


_TEXT = (
    r"(?:\w*(?:Message|Reason|Evidence|Headline|Description|Sentence|Explanation|Verdict|ContinuingCost)|Why|Done"
    r"|message|reason|evidence|headline|title|sentence)"
)
_READS = r"(?:includes|startsWith|endsWith|split|match|matchAll|replace|replaceAll|search|indexOf|lastIndexOf|slice)"
_CALL = r"(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?"
"""The arguments of a call, with at most one pair of nested parentheses."""
_OF_A_TEXT = rf"\b{_TEXT}{_CALL}[!?]*\.{_READS}\("
"""A text that is read: `sentence(x).split(…)`, `job.Reason?.includes(…)`."""
_BY_A_PATTERN = rf"\.(?:test|exec)\((?:\w+[!?]*\.)*{_TEXT}\b"
"""A pattern that is tried on a text: `/Xid/.test(event.Message)`."""
_BY_COMPARISON = rf"\b(?!title){_TEXT} [!=]== ['\"`]\w|['\"`] [!=]== (?:\w+[!?]*\.)*{_TEXT}\b"
"""A text that is compared with a literal: `node.Reason === 'surplus'`."""
_OF_EACH = (
    rf"\b{_TEXT}[!?]*\.(?:filter|find|findIndex|some|every|map|flatMap)"
    rf"\(\(?(?P<each>\w+)\)? =>[^\n]*\b(?P=each)\.{_READS}\("
)
"""Texts that are read one by one: `evidence.filter((each) => each.includes(node))`."""
READINGS_IN_TYPESCRIPT = re.compile("|".join((_OF_A_TEXT, _BY_A_PATTERN, _BY_COMPARISON, _OF_EACH)))
ALLOWED_IN_TYPESCRIPT = {
    "pages/JobOverview.tsx: const traceback = job.FailureReason?.includes('\\n') ? job.FailureReason : undefined": (
        "the page gives a text of several lines a box of its own"
    ),
    "model/spec.ts: throw new NotASpec(error instanceof Error ? error.message.split('\\n')[0]! : String(error))": (
        "the browser's parser adds the document to its message"
    ),
}


def test_the_dashboard_reads_no_sentence():
    found = {
        f"{path.relative_to(ROOT / 'web' / 'src')}: {line.strip()}"
        for path in PAGES
        for line in path.read_text().splitlines()
        if READINGS_IN_TYPESCRIPT.search(line)
    }
    assert sorted(found ^ ALLOWED_IN_TYPESCRIPT.keys()) == []


@pytest.mark.parametrize(
    ("line", "is_read"),
    [
        ("const own = evidence.filter((each) => each.includes(node))", True),
        ("const [before] = sentence(incident.ContinuingCost).split(` fleet ${fleet} `)", True),
        ("INCIDENT.quote(wait.Message.split('. ')[0]!)", True),
        ("all.filter((id) => isTitled || !title.includes(id))", True),
        ("if (/Xid/.test(event.Message)) return", True),
        ("node.Reason === 'surplus'", True),
        ("'surplus' === node.Reason", True),
        ("if (job.Reason === '') return", False),
        ("incident.Outcome === 'JobFailed'", False),
        ("incident.Evidence.map(sentence).join(' ')", False),
        ("names.includes(name)", False),
    ],
)
def test_what_reads_a_sentence_in_typescript(line: str, is_read: bool) -> None:
    assert (READINGS_IN_TYPESCRIPT.search(line) is not None) is is_read


CORE = ROOT / "control_plane" / "core"
WORDS = re.compile(r"(?:^|[ (])[a-z]{2,},? [a-z]{2,}")
ERROR = "an error of the API, which `control_plane.api` returns"
LOG = "the reason of an order, which an agent writes to its log"
COMPOSING = {
    "attestation.py": ERROR,
    "checkpoints.py": ERROR,
    "elastic.py": ERROR,
    "fleets.py": LOG,
    "hangs.py": "the label in place of a stack that an agent could not read",
    "job/ending.py": LOG,
    "job/restart.py": LOG,
    "job/taken_over.py": LOG,
    "observed/jobs.py": "the default of a text that the job loop sets",
    "parity.py": ERROR,
    "timeouts.py": "the meaning of each timeout, for the generated page",
}
"""Modules of the core that may contain words of sentences, with the reason. Remove a module that no longer does."""


def texts(source: str) -> Iterator[str]:
    """Yield each string of a module that contains words of a sentence. Docstrings are none, and failed assertions."""
    nodes = list(ast.walk(ast.parse(source)))
    apart = {node.value for node in nodes if isinstance(node, ast.Expr)}
    apart |= {each for node in nodes if isinstance(node, ast.Assert | ast.Raise) for each in ast.walk(node)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if node not in apart and WORDS.search(text):
                yield text


def test_the_core_composes_no_sentence():
    """The core returns facts. A new module that composes a sentence fails, and so does a module without one here."""
    found = {str(path.relative_to(CORE)) for path in CORE.rglob("*.py") if any(texts(path.read_text()))}
    assert sorted(found ^ COMPOSING.keys()) == []


@pytest.mark.parametrize(
    ("source", "has_words"),
    [
        ("stay(view, f'waits for {count} nodes')", True),
        ("words = 'stored in S3 now'", True),
        ("reason = (f'{node_id} is silent')", True),
        ("name = f'{node_id} {state}'", False),
        ("def f():\n    'A docstring says more than a name.'", False),
        ("assert node, 'the plan has a node'", False),
        ("what = JobFact.TRAINS", False),
    ],
)
def test_what_composes_a_sentence(source: str, has_words: bool) -> None:
    assert any(texts(source)) is has_words


def test_no_code_reads_a_sentence():
    found = {
        f"{path.relative_to(ROOT)}: {path.read_text().splitlines()[line - 1].strip()}"
        for path in MODULES
        for line in readings(path.read_text())
    }
    assert sorted(found - ALLOWED.keys()) == []


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ('row.reason.startswith("surplus")', True),
        ('"AWS announced for" in row.reason', True),
        ('"stopped" in refusal.reason', True),
        ("words.partition(':')", True),
        ('job["Reason"].startswith(_TRAINS)', True),
        ("_XID.search(fault.message)", True),
        ('error.message == "no"', True),
        ("PREFIX == note.lower()", True),
        ("isinstance(row.reason, Surplus)", False),
        ('shard.reason != ""', False),
        ("words != known_words", False),
        ("failure.kind is Kind.LATE", False),
    ],
)
def test_what_reads_a_sentence(source: str, is_read: bool) -> None:
    assert bool(list(readings(source))) is is_read
