"""pytest-randomly seeds torch in tests that use torch, and imports it in no other test."""

from __future__ import annotations

import subprocess
import sys

import pytest_randomly

from tests.warm_parent import ROOT

PROBE = """
import sys
import pytest


class Probe:
    def pytest_sessionfinish(self):
        print("imported:", sorted({"torch", "deepspeed"} & set(sys.modules)))


sys.exit(pytest.main(["--collect-only", "-q", "tests/unit/protocol/test_loopback.py"], plugins=[Probe()]))
"""


def test_a_run_without_torch_does_not_import_it() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "imported: []" in answer.stdout


def test_torch_is_seeded_where_it_is_used() -> None:
    import torch

    assert pytest_randomly.entrypoint_reseeds is not None
    for seed in (7, 8):
        for reseed in pytest_randomly.entrypoint_reseeds:
            reseed(seed)
        assert torch.initial_seed() == seed
