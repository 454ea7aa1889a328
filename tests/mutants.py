"""Plants small faults (mutants) in the product's cores, and reports which ones no test notices.

    python -m tests.mutants --count 300 --seed 7 control_plane/core worker/core everstep/training

A mutant is one changed operator, constant, condition or statement. A child process compiles the changed module from
memory and runs the module's nearest tests, so no file changes. The nearest tests come in rounds: the test files that
bear the module's name, then all other test files that import the module, then the tests of the whole package. A
mutant is killed when a test fails, cannot be collected or exceeds the time limit. Before its mutants, each module's
rounds run unchanged, because a test that fails by itself kills nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("control_plane/core", "worker/core", "everstep/training")
WIDE: dict[str, tuple[str, ...]] = {
    "control_plane/core": ("tests/golden", "tests/unit/control_plane/loop/test_bad_days.py"),
    "worker/core": ("tests/golden/test_protocol.py", "tests/model/test_step_protocol.py"),
    "everstep/training": (),
}
"""Tests that exercise a whole package through its shells or models. They run last, for the mutants that survive."""
IMPORTED_ONCE = ("hypothesis", "sqlalchemy", "fastapi", "httpx", "botocore.session", "numpy", "torch")
"""Modules that no mutant changes. The parent imports them, so that its children need not."""
LEAST_SECONDS = 30.0
FACTOR = 3.0
"""A mutant's round may take `LEAST_SECONDS` plus `FACTOR` times as long as the unchanged module."""
MOST_BASELINE_SECONDS = 300.0
"""Limit for one round without a mutant."""
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
    skipped = set(_without_behaviour(tree))
    found = []
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in skipped and (change := _mutate(copy.copy(node))) is not None:
            found.append(Mutant(path, place, getattr(node, "lineno", 0), change))
    return found


def mutated(mutant: Mutant) -> ast.Module:
    """Return the mutant's module as a syntax tree."""
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    node = next(node for place, node in enumerate(ast.walk(tree)) if place == mutant.place)
    _mutate(node)
    return ast.fix_missing_locations(tree)


def _without_behaviour(tree: ast.Module) -> Iterator[int]:
    """Yield the ids of nodes whose change no test can or need notice: annotations, asserts, errors' texts, `__all__`.

    Changes of a whole declaration (a class's or module's constant) are included: constants are settings, not rules.
    """
    for node in ast.walk(tree):
        parts: Iterable[ast.AST | None] = ()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs, node.args.vararg]
            parts = [node.returns, *node.decorator_list, *(each.annotation for each in arguments if each is not None)]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise):
            parts = [node]
        if isinstance(node, ast.Module | ast.ClassDef):
            parts = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign | ast.Expr | ast.If)]
        for part in parts:
            yield from (id(each) for each in ast.walk(part)) if part is not None else ()


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


class Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a mutant's syntax tree, and every other module as usual."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(ROOT / mutant.path))
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, ROOT / self._mutant.path, loader=self)

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(mutated(self._mutant), self.path, "exec")


def rounds_of(path: str) -> list[tuple[str, ...]]:
    """Return the module's nearest test files, in rounds: by name, by import, and of the whole package."""
    module, name = module_of(path), Path(path).stem
    package = next(each for each in PACKAGES if path.startswith(f"{each}/"))
    # A package within one of PACKAGES exports its modules' functions, so a test may import the package alone.
    targets = {module, module.rpartition(".")[0]} - {module_of(package)}
    importers = [file for file, modules in _imports().items() if targets & modules]
    named = [file for file in importers if name in Path(file).stem]
    rounds = (tuple(sorted(named)), tuple(sorted({*importers} - {*named})), WIDE[package])
    return [each for each in rounds if each]


@functools.cache
def _imports() -> dict[str, set[str]]:
    """Return, for each unit or property test file, the modules that it imports."""
    imports: dict[str, set[str]] = {}
    for file in (path for folder in ("tests/unit", "tests/properties") for path in (ROOT / folder).rglob("test_*.py")):
        found = imports.setdefault(str(file.relative_to(ROOT)), set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            elif isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
    return imports


def run(mutant: Mutant | None, tests: Sequence[str], limit_seconds: float) -> tuple[bool, str]:
    """Run tests in a child process.

    Args:
        mutant: the change under test, or None for the unchanged product.
        tests: test files and folders.
        limit_seconds: the child's time limit.

    Returns:
        Whether all tests passed in time, and the end of their output.
    """
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 3
            try:
                if mutant is not None:
                    sys.meta_path.insert(0, Changed(mutant))
                options = ["-x", "-q", "--no-header", "--tb=line", "--assert=plain", "-p", "no:xdist", "-m", "not rest"]
                code = pytest.main([*options, "-p", "no:faulthandler", "--hypothesis-seed=0", *tests])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(int(code))
        passed = _wait(pid, limit_seconds)
        output.seek(0)
        return passed, output.read().decode(errors="replace")[-1500:]


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
    return bool(readable) and os.waitstatus_to_exitcode(status) in (0, 5)


@functools.cache
def limit_of(tests: tuple[str, ...]) -> float:
    """Return the time limit in seconds for these tests with a mutant.

    Raises:
        RuntimeError: the tests fail without any change.
    """
    begun = time.monotonic()
    passed, output = run(None, tests, MOST_BASELINE_SECONDS)
    if not passed:
        raise RuntimeError(f"{' '.join(tests)}: these tests fail without a mutant:\n{output}")
    return LEAST_SECONDS + FACTOR * (time.monotonic() - begun)


def survives(mutant: Mutant) -> bool:
    """Return whether no test notices a mutant."""
    return all(run(mutant, tests, limit_of(tests))[0] for tests in rounds_of(mutant.path))


def examine(mutants: Sequence[Mutant], deadline: float) -> list[tuple[Mutant, bool]]:
    """Return each mutant of one module with whether it survives. Mutants that no time remains for are left out."""
    return [(mutant, survives(mutant)) for mutant in mutants if time.monotonic() < deadline]


def draw(packages: Sequence[str], count: int, seed: int) -> list[list[Mutant]]:
    """Return `count` random mutants, grouped by module. Each package's share follows its number of mutants."""
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    every = [mutant for path in files for mutant in mutants_of(str(path.relative_to(ROOT)))]
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    groups: dict[str, list[Mutant]] = {}
    for mutant in drawn:
        groups.setdefault(mutant.path, []).append(mutant)
    return sorted(groups.values(), key=len, reverse=True)


def main() -> int:
    """Examine a random draw of mutants, and print the survivors and the counts of each package."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--minutes", type=float, default=20.0)
    options = parser.parse_args()
    print(f"{options.count} mutants of {', '.join(options.packages)}, --seed {options.seed}", flush=True)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    groups = draw(options.packages, options.count, options.seed)
    deadline = time.monotonic() + options.minutes * 60
    found: list[tuple[Mutant, bool]] = []
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for outcomes in pool.imap_unordered(functools.partial(examine, deadline=deadline), groups):
            found += outcomes
            for mutant in (mutant for mutant, is_alive in outcomes if is_alive):
                print(f"survived: {mutant.path}:{mutant.line}: {mutant.change}", flush=True)
    for package in options.packages:
        of_package = [is_alive for mutant, is_alive in found if mutant.path.startswith(f"{package}/")]
        killed = of_package.count(False)
        print(f"{package}: {killed} of {len(of_package)} mutants killed")
    if missing := sum(map(len, groups)) - len(found):
        print(f"not examined within {options.minutes:g} minutes: {missing}")
    return int(any(is_alive for _, is_alive in found) or missing > 0)


if __name__ == "__main__":
    sys.exit(main())
