"""A public class name has one meaning in the product.

The limits below are the present numbers of class names that two or more modules define. Lower a limit whenever you
rename such a class. Schemas of the API, rows of the database and messages of the protocol may share a name with the
thing that they describe, as long as the limit holds.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("control_plane", "everstep", "infra", "worker")
MAX_SHARED_CLASS_NAMES = 46
UNCLEAR_CONSTANTS = frozenset({"LOOK_SECONDS", "POLL_SECONDS", "RETRY_SECONDS", "TELLING_BYTES"})
"""Names of constants that say neither what they limit nor where."""


def shared_class_names(root: Path) -> dict[str, list[Path]]:
    """Return each public name that several modules give to a class, with these modules."""
    modules: dict[str, list[Path]] = defaultdict(list)
    for package in PRODUCT:
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules[node.name].append(path.relative_to(root))
    return {name: paths for name, paths in modules.items() if len(paths) > 1}


def test_few_public_class_names_have_two_meanings() -> None:
    shared = shared_class_names(ROOT)
    assert len(shared) <= MAX_SHARED_CLASS_NAMES, "\n".join(f"{name}: {paths}" for name, paths in shared.items())


def test_a_class_name_that_two_modules_define_is_found(tmp_path: Path) -> None:
    for package in PRODUCT:
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text(f"class {package.title()}: ...\nclass _Own: ...\n")
    (tmp_path / "worker" / "b.py").write_text("class Infra: ...\n")
    assert shared_class_names(tmp_path) == {"Infra": [Path("infra/a.py"), Path("worker/b.py")]}


def test_no_constant_has_a_name_that_fits_every_module() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PRODUCT
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in re.findall(r"^_?([A-Z][A-Z_]+)(?:: Final)? = ", path.read_text(), re.MULTILINE)
        if name in UNCLEAR_CONSTANTS
    ]
    assert not found
