"""Plants small faults (mutants) in the product's cores, and reports which ones no test notices.

    python -m tests.mutants --count 300 --seed 7 control_plane/core worker/core everstep/training

A mutant is one changed operator, constant, condition or statement of a function. For each package, one process

1. draws mutants and marks their places in the loaded functions,
2. runs the package's tests once, and records which tests reach which marks, and their durations,
3. forks a child for each mutant. The child gives the loaded function the mutant's code and runs the tests that reach
   it, the quickest first, until one fails or exceeds the time limit.

A kill counts only if the test that noticed the mutant passes in a child without it. Tests that fail in step 2 are left
out and printed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import gc
import importlib
import json
import mmap
import os
import random
import select
import signal
import struct
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from subprocess import PIPE
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.selection import SLOW, slow

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "control_plane/core": (
        "tests/unit/control_plane/core",
        "tests/unit/control_plane/accounts",
        "tests/unit/control_plane/loop",
        "tests/properties/control_plane",
        "tests/sim",
        "tests/golden/test_incidents.py",
    ),
    "worker/core": (
        "tests/unit/worker/core",
        "tests/properties/worker",
        "tests/golden/test_protocol.py",
        "tests/model",
    ),
    "everstep/training": ("tests/unit/training", "tests/integration/training"),
}
"""Packages whose functions are changed, each with the tests that are to notice it."""
LONGEST_SECONDS = 5.0
"""Longest test that runs, by the list of slow tests. A test of the rest that is not listed does not run."""
MOST_SECONDS = 40.0
"""Recorded seconds of the tests that run for one mutant. It survives if they all pass."""
LEAST_SECONDS, FACTOR = 20.0, 4.0
"""A mutant may take `LEAST_SECONDS` plus `FACTOR` times the recorded seconds of its tests."""
MARKS = "_mutants_reached"
"""Name of the marks in the globals of a changed module."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small change of a module's source."""

    path: str
    """The module's file, relative to the root."""
    place: int
    """Number of the changed node in the order of `ast.walk`."""
    line: int
    change: str
    """What changed, for the report: `< becomes <=`."""

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return module_of(self.path)


def module_of(path: str) -> str:
    """Return the dotted name of the module in a file: `control_plane.core.fleets`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def mutants_of(path: str) -> list[Mutant]:
    """Return every mutant of the module in `path`, in the order of the source's nodes."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kept = set(_behaviour(tree))
    found = []
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in kept and (change := _mutate(copy.copy(node))) is not None:
            found.append(Mutant(path, place, getattr(node, "lineno", 0), change))
    return found


def mutated(mutant: Mutant) -> ast.Module:
    """Return the mutant's module as a syntax tree."""
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    node = next(node for place, node in enumerate(ast.walk(tree)) if place == mutant.place)
    _mutate(node)
    return ast.fix_missing_locations(tree)


def _behaviour(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes in functions' bodies, without annotations, asserts and the texts of errors.

    Signatures and declarations of modules and classes are left out: they are settings and types, not rules. The
    argument `strict` of `zip` is an assert: no caller can see it.
    """
    kept: set[int] = set()
    dropped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kept |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
            dropped |= {id(inner) for part in (node.args, *node.decorator_list) for inner in ast.walk(part)}
            dropped |= {id(inner) for inner in ast.walk(node.returns or ast.Pass())}
        elif isinstance(node, ast.AnnAssign):
            dropped |= {id(inner) for inner in ast.walk(node.annotation)}
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            dropped.add(id(node.value))
        elif isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise):
            dropped |= {id(inner) for inner in ast.walk(node)}
    return kept - dropped


def _mutate(node: ast.AST) -> str | None:
    """Change a node in place, and return the change in words. None if no operator applies to the node."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            node.ops = [COMPARISONS[type(operator)]()]
            return f"{type(operator).__name__} becomes {type(node.ops[0]).__name__}"
        case ast.BoolOp():
            before = type(node.op).__name__
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return f"{before} becomes {type(node.op).__name__}"
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            before = type(node.op).__name__
            node.op = OPERATORS[type(node.op)]()
            return f"{before} becomes {type(node.op).__name__}"
        case ast.UnaryOp(op=ast.Not()):
            node.operand, node.op = ast.UnaryOp(op=ast.Not(), operand=node.operand), ast.Not()
            return "not is dropped"
        case ast.Constant(value=bool() as value):
            node.value = not value
            return f"{value} becomes {node.value}"
        case ast.Constant(value=int() | float() as value):
            node.value = 0 if value == 1 else value + 1
            return f"{value} becomes {node.value}"
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            node.func = ast.Name(id=CALLS[name], ctx=ast.Load())
            return f"{name} becomes {CALLS[name]}"
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
            return "the condition is negated"
        case ast.Continue():
            node.__class__ = ast.Break  # type: ignore[assignment]
            return "continue becomes break"
        case ast.Expr(value=ast.Call()):
            node.value = ast.Constant(value=None)
            return "the call is dropped"
        case _:
            return None


def marked(path: str, mutants: Sequence[tuple[int, Mutant]]) -> ast.Module:
    """Return a module that sets a mark whenever it reaches the statement of a mutant, as a syntax tree.

    Args:
        path: the module's file.
        mutants: the module's mutants, each with the index of its mark.
    """
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    marks: dict[int, list[int]] = {}
    statements = {
        id(inner): id(statement)  # The innermost statement comes last in the order of `walk`.
        for statement in nodes
        if isinstance(statement, ast.stmt)
        for inner in ast.walk(statement)
    }
    for index, mutant in mutants:
        marks.setdefault(statements[id(nodes[mutant.place])], []).append(index)
    for node in nodes:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [each for old in block for each in (*_marks(marks.get(id(old), ()), old), old)])
    return ast.fix_missing_locations(tree)


def _marks(indexes: Iterable[int], place: ast.stmt) -> list[ast.stmt]:
    return [ast.copy_location(ast.parse(f"{MARKS}[{index}] = 1").body[0], place) for index in indexes]


def change(path: str, tree: ast.Module, marks: mmap.mmap | None = None) -> None:
    """Give every loaded function of a module the code that it has in this tree.

    The function objects stay the same, so that the change reaches every module that imported them.
    """
    file, installed = str(ROOT / path), sysconfig.get_path("purelib")
    codes: dict[tuple[str, int], CodeType] = {}
    pending = [compile(tree, file, "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    gc.unfreeze()  # `gc.get_objects` leaves out the objects that conftest.py freezes.
    for each in [each for each in gc.get_objects() if type(each) is FunctionType]:  # A proxy may raise in `isinstance`.
        old = each.__code__
        new = codes.get((old.co_qualname, old.co_firstlineno))
        if old.co_filename == file and new is not None and new.co_freevars == old.co_freevars:
            each.__code__ = new
            if marks is not None:
                each.__globals__[MARKS] = marks
    for each in [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]:
        # A cached result from before the change would hide it. Caches of installed packages stay: torch's compiler uses
        # caches as registries, and fails when they are empty.
        wrapped = each.__wrapped__
        if type(wrapped) is FunctionType and not wrapped.__code__.co_filename.startswith(installed):
            each.cache_clear()


@dataclass(eq=False)  # pytest hashes its plugins
class Examination:
    """A plugin of pytest that examines mutants after it has run the collected tests once."""

    mutants: Sequence[Mutant]
    deadline: float
    """Time of the monotonic clock at which the examination ends."""
    report: Callable[[Mutant, str], None]
    """Receives each examined mutant, with the test that killed it or an empty string."""
    unfit: set[str] = field(default_factory=set)
    """Tests that fail without a mutant."""
    _has_failed: bool = False
    _passed: set[str] = field(default_factory=set)
    """Tests that passed in a child without a mutant."""

    @pytest.hookimpl(trylast=True)  # after the tests of the rest have their mark
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seconds = slow(SLOW.read_text())
        items[:] = [
            item
            for item in items
            if seconds.get(item.nodeid, inf if item.get_closest_marker("rest") else 0.0) <= LONGEST_SECONDS
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run every test once, then the tests of each mutant."""
        marks = mmap.mmap(-1, len(self.mutants) + 1)
        by_path: dict[str, list[tuple[int, Mutant]]] = {}
        for index, mutant in enumerate(self.mutants):
            importlib.import_module(mutant.module)
            by_path.setdefault(mutant.path, []).append((index, mutant))
        for path, mutants in by_path.items():
            change(path, marked(path, mutants), marks)
        reaching: list[list[tuple[float, pytest.Item]]] = [[] for _ in self.mutants]
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            marks[:] = bytes(len(marks))
            begun, self._has_failed = time.monotonic(), False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._has_failed:
                self.unfit.add(item.nodeid)
                continue
            for index in range(len(self.mutants)):
                if marks[index]:
                    reaching[index].append((time.monotonic() - begun, item))
        for mutant, tests in zip(self.mutants, reaching, strict=True):
            if time.monotonic() > self.deadline:
                break
            self.report(mutant, self._killer(mutant, sorted(tests, key=lambda test: (test[0], test[1].nodeid))))
        return True

    def _killer(self, mutant: Mutant, tests: Sequence[tuple[float, pytest.Item]]) -> str:
        """Return the test that notices a mutant, or an empty string."""
        items, total = [], 0.0
        for seconds, item in tests:
            total += seconds
            if total > MOST_SECONDS and items:
                break
            items.append(item)
        limit = LEAST_SECONDS + FACTOR * total
        while (killer := self._first_failure(items, limit, mutant)) is not None:
            if killer.nodeid in self._passed or self._first_failure([killer], LEAST_SECONDS + limit, None) is None:
                self._passed.add(killer.nodeid)
                return killer.nodeid
            self.unfit.add(killer.nodeid)
            items = [item for item in items if item is not killer]
        return ""

    def _first_failure(
        self, items: Sequence[pytest.Item], limit_seconds: float, mutant: Mutant | None
    ) -> pytest.Item | None:
        """Return the first test that fails or exceeds the time limit in a child process."""
        current = mmap.mmap(-1, 8)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
                if mutant is not None:
                    change(mutant.path, mutated(mutant))
                for index, item in enumerate(items):
                    current[:] = struct.pack("q", index)
                    self._has_failed = False
                    item._initrequest()  # type: ignore[attr-defined]  # the item has run before
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if self._has_failed:
                        break
                else:
                    code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        passed = _wait(pid, limit_seconds)
        return None if passed else items[struct.unpack("q", current)[0]]


def _wait(pid: int, limit_seconds: float) -> bool:
    """Return whether a child ends with code 0 in time. Kill its process group in any case."""
    descriptor = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([descriptor], [], [], limit_seconds)
    finally:
        os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return bool(readable) and os.waitstatus_to_exitcode(status) == 0


def examine(mutants: Sequence[Mutant], tests: Sequence[str], deadline: float) -> None:
    """Examine mutants in this process. Write each with its killer, and then the unfit tests, as lines of JSON."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)

    def report(mutant: Mutant, killer: str) -> None:
        print(json.dumps([asdict(mutant), killer]), file=lines)

    examination = Examination(mutants, deadline, report)
    options = ["-q", "--no-header", "--tb=no", "--no-summary", "--assert=plain", "-m", "not production"]
    plugins = ["-p", "no:xdist", "-p", "no:faulthandler", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = pytest.main([*options, *plugins, *tests], plugins=[examination])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r} before it had examined {len(mutants)} mutants")
    print(json.dumps([None, sorted(examination.unfit)]), file=lines)


def examined(
    mutants: Sequence[Mutant], tests: Sequence[str], deadline: float, root: Path = ROOT
) -> Iterator[tuple[Mutant | None, Any]]:
    """Examine mutants in a process of its own: in a child of `multiprocessing`, loaders' worker processes hang.

    Args:
        mutants: what to plant.
        tests: what is to notice them, as arguments for pytest.
        deadline: time of the monotonic clock at which the examination ends.
        root: folder of the mutants' files.

    Yields:
        Each mutant with the test that killed it or an empty string, and at the end None with the unfit tests.
    """
    program = (
        "import json, sys; from pathlib import Path; from tests import mutants; given = json.load(sys.stdin);"
        "mutants.ROOT = Path(given[0]); sys.path.insert(0, given[0]);"
        "mutants.examine([mutants.Mutant(**each) for each in given[1]], *given[2:])"
    )
    given = json.dumps([str(root), [asdict(mutant) for mutant in mutants], list(tests), deadline])
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin:
            process.stdin.write(given)
        for line in process.stdout:
            fields, outcome = json.loads(line)
            yield (None if fields is None else Mutant(**fields)), outcome


def draw(packages: Iterable[str], count: int, seed: int) -> dict[str, list[Mutant]]:
    """Return `count` random mutants by package. Each package's share follows its number of mutants."""
    every = {
        mutant: package
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
        for mutant in mutants_of(str(path.relative_to(ROOT)))
    }
    drawn: dict[str, list[Mutant]] = {package: [] for package in packages}
    for mutant in random.Random(seed).sample(list(every), min(count, len(every))):
        drawn[every[mutant]].append(mutant)
    return drawn


def main() -> int:
    """Examine a random draw of mutants, and print the survivors and the counts of each package."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("packages", nargs="*", default=list(PACKAGES))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--minutes", type=float, default=20.0)
    options = parser.parse_args()
    print(f"{options.count} mutants of {', '.join(options.packages)}, --seed {options.seed}", flush=True)
    drawn = draw(options.packages, options.count, options.seed)
    deadline = time.monotonic() + options.minutes * 60
    killed, seen = dict.fromkeys(drawn, 0), dict.fromkeys(drawn, 0)

    def count(package: str) -> None:
        for mutant, outcome in examined(drawn[package], PACKAGES[package], deadline):
            if mutant is None:
                for test in outcome:
                    print(f"left out, because it fails without a mutant: {test}", flush=True)
                continue
            seen[package] += 1
            killed[package] += bool(outcome)
            if not outcome:
                print(f"survived: {mutant.path}:{mutant.line}: {mutant.change}", flush=True)

    with ThreadPoolExecutor(len(drawn)) as pool:
        list(pool.map(count, drawn))
    for package in drawn:
        print(f"{package}: {killed[package]} of {seen[package]} mutants killed")
    if missing := sum(map(len, drawn.values())) - sum(seen.values()):
        print(f"not examined within {options.minutes:g} minutes: {missing}")
    return int(killed != seen or missing > 0)


if __name__ == "__main__":
    sys.exit(main())
