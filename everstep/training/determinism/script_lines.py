"""Finds the lines of the script that change its variables, or that call Everstep, for the findings of a rehearsal.

Invariant: it reads source files only. A line that it does not find is missing from the result, and costs no finding.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from everstep.protocol.limits import cut
from everstep.protocol.rehearsals import MAX_REHEARSED_CHARACTERS, ScriptLine
from everstep.training.determinism.calls import is_user_file

_CHANGES = {
    "append",
    "appendleft",
    "extend",
    "add",
    "update",
    "setdefault",
    "pop",
    "popleft",
    "copy_",
    "load_state_dict",
}
"""Methods that change a container, a tensor or a module."""
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_MAX_FILES = 50


def caller() -> tuple[str, int] | None:
    """Return file and line of the innermost frame of the script, or None if the script does not run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def line_of(name: str, place: tuple[str, int]) -> ScriptLine:
    """Return a line with the path below the working directory, or else the file's name."""
    file, line = place
    path = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else os.path.basename(file)
    return ScriptLine(name=cut(name, MAX_REHEARSED_CHARACTERS), file=cut(path, MAX_REHEARSED_CHARACTERS), line=line)


def lines_of_variables(names: Sequence[str]) -> list[ScriptLine]:
    """Return one line per variable found, named as by `values_of_script`. Loops and functions come first."""
    changes = [(path, *each) for path in _files(names) for each in _changes_of(path)]
    found: list[ScriptLine] = []
    for name in names:
        root, _, rest = name.partition(".")
        module = getattr(sys.modules.get(root), "__file__", None)
        # The part nearest to the value decides: `tr.iter_num` is changed as `self.iter_num`.
        for part in reversed([each for each in rest.split(".") if not each.isdigit()]):
            # A loop at module level changes the global `i`. A loop in a function with a local variable `i` does not.
            of_loop = (module, "") if part == rest else None
            places = [
                (weight + 4 * (function == root or (weight > 1 and (path, function) == of_loop)), path, line)
                for path, target, function, line, weight in changes
                if target == part
            ]
            if places:
                _, path, line = max(places, key=lambda each: (each[0], -each[2]))
                found.append(line_of(name, (path, line)))
                break
    return found


def _files(names: Sequence[str]) -> list[str]:
    """Return the script's source files: first those whose functions run, then those with the named globals."""
    files: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        files[frame.f_code.co_filename] = None
        frame = frame.f_back
    named = [module for name in names if (module := sys.modules.get(name.partition(".")[0])) is not None]
    for module in (*named, *list(sys.modules.values())):
        files[getattr(module, "__file__", None) or "<built-in>"] = None
    return [file for file in files if is_user_file(file) and file.endswith(".py")][:_MAX_FILES]


def _changes_of(path: str) -> list[tuple[str, str, int, int]]:
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return list(_walk(tree, "", is_in_loop=False))


def _walk(node: ast.AST, function: str, *, is_in_loop: bool) -> Iterator[tuple[str, str, int, int]]:
    for child in ast.iter_child_nodes(node):
        within, is_repeated = function, is_in_loop or isinstance(child, _LOOPS)
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            within, is_repeated = child.name, False
        weight = 2 * (is_repeated and within != "__init__") + (bool(within) and within != "__init__")
        for target in _targets(child):
            line = getattr(target, "lineno", 0)
            yield _name_of(target), within, line, weight + _goes_on(child, target)
        yield from _walk(child, within, is_in_loop=is_repeated)


def _goes_on(node: ast.AST, target: ast.expr) -> bool:
    """Return whether the new value depends on the old one, as in `x += 1` or `x = max(x, y)`."""
    if isinstance(node, ast.Assign):
        return any(isinstance(each, ast.expr) and _name_of(each) == _name_of(target) for each in ast.walk(node.value))
    return isinstance(node, (ast.AugAssign, ast.Call))


def _targets(node: ast.AST) -> Iterable[ast.expr]:
    if isinstance(node, ast.Assign):
        return [each for target in node.targets for each in _unpacked(target)]
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        return [node.target]
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return _unpacked(node.target)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        return [node.func.value]
    return []


def _unpacked(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        return [each for part in target.elts for each in _unpacked(part)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def _name_of(target: ast.expr) -> str:
    """Return the last part of an assigned expression: `iter_num` of `self.iter_num`, `lr` of `group["lr"]`."""
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Subscript):
        index = target.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, str):
            return index.value
        return _name_of(target.value)
    return target.id if isinstance(target, ast.Name) else ""
