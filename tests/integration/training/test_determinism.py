"""The determinism check names each planted source of non-determinism, and passes deterministic scripts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.determinism import REPORT, Kind, Pattern, Source, Verdict, conclude, read_report
from everstep.protocol.plan import CHECK_VARIABLE
from tests.integration.training import planted_scripts
from tests.ports import ReservedPort
from tests.warm_parent import ROOT, WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

PASSES = 3


def checked(parent: WarmParent, directory: Path, name: str, *, world: int = 1, **arguments: Any) -> Verdict:
    """Run the three passes (runs of the same steps) of a check in forked processes. Return the result of all ranks."""
    call = "tests.integration.training.planted_scripts:run"
    for number in range(1, PASSES + 1):
        given = {**arguments, "pass": number}
        own = directory / f"pass-{number}"
        own.mkdir()
        ranks = parent.fork(
            call, name, str(directory), given, world=world, directory=own, environment={}, result="unused"
        )
        assert ranks.wait() == [0] * world, ranks.logs()
    reports = [read_report((directory / f"output-{rank}" / REPORT).read_bytes()) for rank in range(world)]
    verdict = conclude(reports)
    assert verdict.sentence in ranks.log(0)
    return verdict


DETERMINISTIC: list[dict[str, Any]] = [
    {"name": "plain"},
    {"name": "plain", "workers": 2},
    {"name": "plain", "world": 2},
    {"name": "plain", "world": 2, "workers": 1},
    {"name": "plain", "owns_loop": True},
    {"name": "plain", "accumulate": 2},
    {"name": "plain", "until": 5},
    {"name": "augmentation_kept"},
    {"name": "dropout"},
    {"name": "augmentation_kept", "workers": 2},
    *(
        {"name": name, "other_script": "scripts", "world": 2}
        for name in ("ddp", "fsdp", "zero", "scaler", "two_optimizers", "accumulated", "max_norm")
    ),
    {"name": "data", "other_script": "scripts", "world": 2, "options": {"kind": "stateful", "workers": 2}},
    {"name": "data", "other_script": "scripts", "world": 2, "options": {"kind": "iterable"}},
    {"name": "plain", "other_script": "trainer_scripts", "world": 2},
    {"name": "plain", "other_script": "accelerate_scripts", "world": 2},
    {"name": "plain", "other_script": "lightning_scripts", "options": {"kind": "one"}},
]


@pytest.mark.long(keep=6)
@pytest.mark.parametrize("given", DETERMINISTIC, ids=str)
def test_a_deterministic_script_passes(warm_parent: WarmParent, tmp_path: Path, given: dict[str, Any]) -> None:
    verdict = checked(warm_parent, tmp_path, **given)
    assert verdict.is_deterministic, verdict
    last = given.get("until", 8)
    assert f"Steps 3 to {last} are bit-identical" in verdict.sentence


@pytest.mark.long(keep=6)
@pytest.mark.parametrize(
    ("name", "source", "pattern", "evidence"),
    [
        ("shuffle", Source.DATA_ORDER, Pattern.EVERY_RUN, "random.Random without a seed at planted_scripts.py"),
        ("collator", Source.COLLATOR, Pattern.EVERY_RUN, "os.urandom at planted_scripts.py"),
        ("augmentation_clock", Source.AUGMENTATION, Pattern.EVERY_RUN, "time.time_ns at planted_scripts.py"),
        ("augmentation_entropy", Source.AUGMENTATION, Pattern.EVERY_RUN, "os.urandom at planted_scripts.py"),
        ("augmentation_generator", Source.AUGMENTATION, Pattern.RESTART, "planted_scripts.PRIVATE"),
        ("average", Source.UNKEPT_STATE, Pattern.RESTART, "model/0.weight"),
        ("kernel", Source.KERNEL, Pattern.EVERY_RUN, "model/0.weight"),
        ("files", Source.DATASET, Pattern.EVERY_RUN, "os.listdir at planted_scripts.py"),
        ("clock_rate", Source.OPTIMIZER_SETTING, Pattern.EVERY_RUN, "lr of group 0"),
        ("counted_rate", Source.OPTIMIZER_SETTING, Pattern.RESTART, "lr of group 0"),
        ("system_random", Source.ENTROPY, Pattern.EVERY_RUN, "os.urandom at planted_scripts.py"),
        ("default_rng", Source.ENTROPY, Pattern.EVERY_RUN, "os.urandom at planted_scripts.py"),
        ("own_seed", Source.GENERATOR, Pattern.EVERY_RUN, "(torch)"),
        ("iterable", Source.LOADER, Pattern.EVERY_RUN, "data"),
        ("forgetful", Source.RESTORE, Pattern.RESTART, "extra/forgetful"),
        ("timer", Source.REGISTERED_OBJECT, Pattern.EVERY_RUN, "extra/timer"),
        ("logged_time", Source.LOGGED_VALUE, Pattern.EVERY_RUN, "(now)"),
    ],
)
def test_the_check_names_a_planted_source(
    warm_parent: WarmParent, tmp_path: Path, name: str, source: Source, pattern: Pattern, evidence: str
) -> None:
    verdict = checked(warm_parent, tmp_path, name)
    finding = verdict.ranks[0].finding
    assert finding is not None, verdict
    assert (verdict.source, finding.pattern) == (source, pattern), verdict.sentence
    assert evidence in verdict.sentence
    assert finding.step == (2 if source is Source.RESTORE else 3)
    assert f"docs/resume.md#{source}" in verdict.advice


@pytest.mark.parametrize("name", ["collator", "kernel", "augmentation_clock"])
def test_the_verdict_names_the_rank_where_the_difference_begins(
    warm_parent: WarmParent, tmp_path: Path, name: str
) -> None:
    """Only rank 1 is not deterministic. Rank 0 gets another gradient by the sum over all ranks."""
    verdict = checked(warm_parent, tmp_path, name, world=2)
    assert not verdict.is_deterministic
    assert next(report.finding.kind for report in verdict.ranks if report.finding) is Kind.GRADIENT
    expected = {"collator": Source.COLLATOR, "kernel": Source.KERNEL, "augmentation_clock": Source.AUGMENTATION}
    assert verdict.source is expected[name], verdict.sentence
    assert "rank 1" in verdict.sentence or name == "kernel"


@pytest.mark.parametrize("name", ["collator", "augmentation_clock", "augmentation_entropy"])
def test_workers_report_what_they_do(warm_parent: WarmParent, tmp_path: Path, name: str) -> None:
    verdict = checked(warm_parent, tmp_path, name, workers=2)
    assert verdict.source is (Source.COLLATOR if name == "collator" else Source.AUGMENTATION), verdict.sentence
    call, text = {
        "collator": ("os.urandom", "noise = int.from_bytes(os.urandom"),
        "augmentation_clock": ("time.time_ns", "time.time_ns() % 1_000_003"),
        "augmentation_entropy": ("os.urandom", "sample + random.SystemRandom()"),
    }[name]
    source = Path(planted_scripts.__file__).read_text()
    line = next(number for number, each in enumerate(source.splitlines(), 1) if text in each)
    finding = verdict.ranks[0].finding
    assert finding is not None
    assert f"{call} at planted_scripts.py:{line}" in finding.calls


def test_a_script_that_ends_too_early_has_no_result(warm_parent: WarmParent, tmp_path: Path) -> None:
    verdict = checked(warm_parent, tmp_path, "plain", until=2)
    assert not verdict.is_deterministic
    assert verdict.source is None
    assert "the script ended after step 2. A check needs at least 3 steps" in verdict.sentence


HASHED = """
import os
import torch
import everstep.training

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
weights = {name: number for number, name in enumerate({f"layer {number}" for number in range(9)})}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = everstep.training.init(model=model, optimizer=optimizer)
print("pid", os.getpid(), flush=True)
for _ in session.batches(until_step=100):
    optimizer.zero_grad()
    (model(torch.ones(2, 3)) * (1 + weights["layer 3"])).sum().backward()
    optimizer.step()
session.close()
print("results are written", flush=True)
"""


@pytest.mark.long
def test_processes_are_replaced_between_the_passes(tmp_path: Path) -> None:
    """Two ranks run a script whose result depends on the order of a set, in real processes.

    Each process keeps its pid, and no code after the training loop runs.
    """
    script = tmp_path / "train.py"
    script.write_text(HASHED)
    with contextlib.closing(ReservedPort()) as port:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"},
            CHECK_VARIABLE: "4",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.number),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                cwd=tmp_path,
                env={**environment, "RANK": str(rank), "EVERSTEP_OUTPUT_DIR": str(tmp_path / f"output-{rank}")},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=170)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    for rank, output in zip(ranks, outputs, strict=True):
        assert output.count(f"pid {rank.pid}\n") == output.count("pid") == PASSES
        assert "results are written" not in output
    assert "Determinism check: hash-order. Step 2, rank 0: " in outputs[0]
    reports = [read_report((tmp_path / f"output-{rank}" / REPORT).read_bytes()) for rank in range(2)]
    assert conclude(reports).source is Source.HASH_ORDER
