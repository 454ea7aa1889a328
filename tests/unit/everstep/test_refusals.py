"""A source is searched for options and classes that Everstep refuses, before its upload and without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.refusals import CLASSES, OPTIONS, find

SCRIPT = "import everstep.integrations.transformers\n"


def found(directory: Path, source: str, *arguments: str, name: str = "train.py") -> list[tuple[str, str]]:
    (directory / name).write_text(source)
    return [(each.place, each.name) for each in find(directory, [name], arguments)]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("TrainingArguments(output_dir='a', auto_find_batch_size=True)", ["auto_find_batch_size"]),
        ("TrainingArguments(auto_find_batch_size=False, ignore_data_skip=size > 4)", []),
        ("lightning.pytorch.Trainer(max_time='00:01:00:00', reload_dataloaders_every_n_epochs=0)", ["max_time"]),
        ("trl.GRPOTrainer(model)", ["GRPOTrainer"]),
        ("model = FullyShardedDataParallel(model)", ["FullyShardedDataParallel"]),
        ("model = torch.nn.parallel.DistributedDataParallel(model)", []),
        ("def GRPOTrainer(): return functions[0]()", []),
    ],
)
def test_a_source_names_what_is_refused(tmp_path: Path, line: str, names: list[str]) -> None:
    assert found(tmp_path, SCRIPT + line) == [("train.py:2", name) for name in names]


@pytest.mark.parametrize(
    ("arguments", "is_found"),
    [
        (["--auto_find_batch_size"], True),
        (["--auto-find-batch-size", "--lr", "3"], True),
        (["--auto_find_batch_size", "true"], True),
        (["--auto_find_batch_size=1"], True),
        (["--auto_find_batch_size", "False"], False),
        (["--auto_find_batch_size=no"], False),
        (["auto_find_batch_size"], False),
        (["--lr", "--"], False),
    ],
)
def test_a_command_line_names_what_is_refused(tmp_path: Path, arguments: list[str], is_found: bool) -> None:
    assert found(tmp_path, SCRIPT, *arguments) == [("arguments", "auto_find_batch_size")] * is_found


def test_a_source_without_everstep_is_not_refused(tmp_path: Path) -> None:
    assert found(tmp_path, "import trl\ntrl.GRPOTrainer()", "--ignore_data_skip") == []


@pytest.mark.parametrize(
    "source", ["def", "\0", "x = '" + "(" * 300, "(" * 5000], ids=["syntax", "nul", "open", "deep"]
)
def test_a_file_that_is_not_python_is_skipped(tmp_path: Path, source: str) -> None:
    assert found(tmp_path, source) == []
    assert list(find(tmp_path, ["missing.py", "data.bin"])) == []


def test_each_refusal_is_a_reason_and_a_sentence_of_advice() -> None:
    for refusal in (*OPTIONS.values(), *CLASSES.values()):
        assert not refusal.reason.endswith(".")
        assert refusal.alternative[0].isupper()
        assert refusal.alternative.endswith(".")
