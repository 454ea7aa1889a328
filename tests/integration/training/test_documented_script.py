"""The first script of docs/training.md runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.reference import References
from tests.warm_parent import ROOT, WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def test_the_first_script_of_the_documentation_runs(warm_parent: WarmParent, tmp_path: Path) -> None:
    section = (ROOT / "docs" / "training.md").read_text().partition("## Your own script")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    script = tmp_path / "fit.py"
    script.write_text(found[1])
    launch = References(warm_parent).start(script, 2, tmp_path / "run", {"steps": "3"})
    assert launch.wait() == [0, 0], launch.logs()
    assert (tmp_path / "run" / "rank=0" / "model.pt").stat().st_size > 0
