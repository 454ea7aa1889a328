"""A job's name identifies a job only together with a project.

Jobs of several projects may have the same name. A query by name alone would read or change the job of another project.
Modules therefore use run ids. The few functions that compare a name also receive a project.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "control_plane"
ALLOWED = {
    "db/jobs.py": {"<module>"},
    "db/events.py": {"newest_of", "page"},
    "db/drills.py": {"page"},
    "loop/event_feed.py": {"has"},
}
"""Functions that may compare a job's name, by module. `db/jobs.py` builds the statements of `ByNameOrRun`."""
JOBS = {"Job", "JobRow", "_JOB"}
COMPARISONS = {"in_", "is_", "like", "ilike", "startswith", "endswith", "contains", "between", "not_in", "is_not"}
"""Methods of a database column with which a query compares the column."""
SEARCHES = {"db/job_lists.py": {"_conditions"}}
"""Functions that search for a part of a job's name, by module. They also filter by the project."""


def is_name(node: ast.expr) -> bool:
    """Return whether an expression is the column of a job's name."""
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr == "job_name" or (
        node.attr == "name" and isinstance(node.value, ast.Name) and node.value.id in JOBS
    )


def comparisons(tree: ast.AST, place: str = "<module>") -> Iterator[tuple[str, str]]:
    """Yield each comparison of a job's name with a value, and the innermost function that contains it."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else place
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            if not all(isinstance(each, ast.Constant) and each.value is None for each in node.comparators):
                operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COMPARISONS:
            operands = [node.func.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "equal_to":
            operands = [ast.Attribute(node.args[0], keyword.arg) for keyword in node.keywords if keyword.arg]
        if any(is_name(each) for each in operands):
            yield inside, ast.unparse(node)
        yield from comparisons(node, inside)


def test_only_functions_that_take_a_project_compare_names_of_jobs() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), place, text)
        for path in sorted(ROOT.rglob("*.py"))
        for place, text in comparisons(ast.parse(path.read_text()))
    }
    allowed = {(module, place) for known in (ALLOWED, SEARCHES) for module, names in known.items() for place in names}
    wrong = [
        f"control_plane/{module}, {place}: {text}"
        for module, place, text in sorted(found)
        if (module, place) not in allowed
    ]
    assert not wrong, "Compare the run id, or the name together with the project:\n" + "\n".join(wrong)
    unused = allowed - {(module, place) for module, place, _ in found}
    assert not unused, f"These functions compare no name any more: {sorted(unused)}"


def test_each_search_for_a_job_names_its_projects() -> None:
    """`jobs.get`, `jobs.named` and `descriptions.find` search all projects by default; only tests rely on this."""
    searches = {"jobs.get", "jobs.named", "descriptions.find"}
    calls = [
        (path, node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in searches
    ]
    assert calls
    wrong = [f"{path.relative_to(ROOT)}: {ast.unparse(node)}" for path, node in calls if len(node.args) < 3]
    assert not wrong, "Pass `caller.project_filter`:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("select(Job).where(Job.name == name)", 1),
        ("query.where(_JOB.name == bindparam('x'))", 1),
        ("query.where(name == Event.job_name)", 1),
        ("query.where(Drill.job_name.in_(names))", 1),
        ("event.job_name != other.job_name", 1),
        ("event.job_name in jobs", 1),
        ("which.job_name is not None", 0),
        ("select(Job).where(Job.run_id == run_id)", 0),
        ("fleet.name == name", 0),
    ],
)
def test_each_kind_of_comparison_counts(code: str, count: int) -> None:
    assert len(list(comparisons(ast.parse(f"def f():\n    {code}")))) == count
