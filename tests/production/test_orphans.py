"""The search for orphans finds objects without a run, shards without a manifest, and unfinished uploads."""

from __future__ import annotations

import pytest

from tests.production.orphans import strange

STEP = "projects/default/jobs/gpt/run=ab/checkpoints/run=ab/gen=1/step=50/"
KEPT = [
    "evidence/i-1/console.log",
    "projects/default/sources/1.tar.gz",
    "projects/default/jobs/gpt/run=ab/logs/gen=1/node=i-1/0-1.jsonl",
    f"{STEP}manifest.json",
    f"{STEP}x/rank=0.safetensors",
]


def test_objects_of_a_run_are_no_orphans() -> None:
    assert strange(KEPT, [], {"ab"}) == []


@pytest.mark.parametrize(
    ("keys", "uploads", "runs", "words"),
    [
        (KEPT, ["a"], {"ab"}, "the upload of a was not finished"),
        ([*KEPT, "x/run=cd/logs/y"], [], {"ab"}, "x/run=cd/logs/y belongs to no run"),
        (KEPT[:3] + KEPT[4:], [], {"ab"}, f"{STEP}x/rank=0.safetensors belongs to no checkpoint"),
    ],
)
def test_an_orphan_is_named(keys: list[str], uploads: list[str], runs: set[str], words: str) -> None:
    assert strange(keys, uploads, runs) == [words]
