"""Tests the requests and the output of `everstep checkpoints describe` and `everstep checkpoints export`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.unit.everstep.checkpoints.stored import Stored, store
from tests.unit.everstep.conftest import run as run

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(name="listed")
def made_list(tmp_path: Path) -> dict[str, Any]:
    """Return a list of four checkpoints.

    Three are of step 7, from three generations: two are complete, and the newest is still being uploaded. The
    checkpoint of step 8 is complete.
    """
    uri = str(store(tmp_path / "checkpoint", {0: [Stored("model/w", WEIGHT)]}))
    common = {"Step": 7, "S3Uri": uri, "Status": "Complete"}
    return {
        "Checkpoints": [
            {**common, "Generation": 2, "S3Uri": "nowhere"},
            {**common, "Generation": 3},
            {**common, "Generation": 4, "Status": "Uploading", "S3Uri": "nowhere"},
            {**common, "Step": 8, "Generation": 3, "S3Uri": "nowhere"},
        ]
    }


def test_one_checkpoint_is_described_with_its_verification_and_the_next_command(run: Any) -> None:
    time = datetime(2026, 3, 1, 12, tzinfo=UTC)
    answer = {
        "Step": 7,
        "Generation": 3,
        "Status": "Complete",
        "S3Uri": "s3://b/manifest.json",
        "Bytes": 2**20,
        "CreationTime": time,
        "CompletionTime": time,
        "IsPinned": True,
        "Verification": "Damaged",
        "VerificationTime": time,
        "VerificationMessage": "rank 1: the object is missing",
    }
    arguments = ("checkpoints", "describe", "gpt", "7", "--generation", "3")
    code, out, error, calls = run(*arguments, describe_checkpoint=answer)
    assert (code, calls) == (0, [("describe_checkpoint", {"TrainingJobName": "gpt", "Step": 7, "Generation": 3})])
    shown = {line[:10].strip(): line[10:].strip() for line in out.splitlines()}
    assert shown["manifest"] == "s3://b/manifest.json"
    assert shown["pinned"] == "yes"
    assert shown["verified"].startswith("damaged ")
    assert shown["verified"].endswith("rank 1: the object is missing")
    assert "next: everstep checkpoints export gpt 7 --generation 3 --to FOLDER" in error
    uploading = {**answer, "Status": "Uploading", "IsPinned": False, "Verification": "NotVerified"}
    code, out, error, _ = run(*arguments, describe_checkpoint=uploading)
    assert code == 0
    assert "not yet" in out
    assert "export" not in error, "only a complete checkpoint can be exported"


def test_the_newest_complete_checkpoint_of_the_step_is_exported(
    run: Any, tmp_path: Path, listed: dict[str, Any]
) -> None:
    arguments = ("checkpoints", "export", "gpt", "7", "--to", str(tmp_path / "to"))
    code, out, _, calls = run(*arguments, "--output", "json", list_checkpoints=listed)
    assert code == 0
    assert json.loads(out)["Files"] == ["model.safetensors"]
    assert calls == [("list_checkpoints", {"TrainingJobName": "gpt", "MinStep": 7})]
    assert np.array_equal(load_file(tmp_path / "to" / "model.safetensors")["w"], WEIGHT)
    again = ("checkpoints", "export", "gpt", "7", "--to", str(tmp_path / "other"))
    code, out, _, _ = run(*again, list_checkpoints=listed)
    assert (code, out) == (0, f"exported 1 tensor of 24 B to {tmp_path / 'other'}: model.safetensors\n")


def test_a_step_without_a_complete_checkpoint_is_an_error_with_the_next_command(
    run: Any, tmp_path: Path, listed: dict[str, Any]
) -> None:
    arguments = ("checkpoints", "export", "gpt", "6", "--to", str(tmp_path / "to"))
    code, _, error, _ = run(*arguments, list_checkpoints=listed)
    assert code != 0
    assert "gpt has no complete checkpoint of step 6" in error
    assert "everstep checkpoints list gpt" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("form", "last"), [("dcp", ".metadata"), ("deepspeed-universal", "latest_universal")], ids=["DCP", "universal"]
)
def test_other_formats_are_written_on_request(
    run: Any, tmp_path: Path, listed: dict[str, Any], form: str, last: str
) -> None:
    arguments = ("checkpoints", "export", "gpt", "7", "--to", str(tmp_path / "to"), "--format", form)
    code, out, _, _ = run(*arguments, "--output", "json", list_checkpoints=listed)
    assert code == 0
    assert json.loads(out)["Files"][-1] == last
    assert (tmp_path / "to" / last).exists()


def test_options_of_one_format_are_refused_for_others(run: Any, tmp_path: Path, listed: dict[str, Any]) -> None:
    arguments = ("checkpoints", "export", "gpt", "7", "--to", str(tmp_path / "to"), "--format", "dcp")
    code, _, error, _ = run(*arguments, "--dtype", "bfloat16", list_checkpoints=listed)
    assert code != 0
    assert "--strip, --dtype, --config and --merge need --format hf" in error


def test_a_configuration_is_read_from_a_file(run: Any, tmp_path: Path, listed: dict[str, Any]) -> None:
    config = tmp_path / "mine.json"
    arguments = ("checkpoints", "export", "gpt", "7", "--to", str(tmp_path / "to"), "--config", str(config))
    code, _, error, _ = run(*arguments, list_checkpoints=listed)
    assert code != 0
    assert f"{config} cannot be read" in error
    config.write_text('{"model_type": "mine"}')
    code, _, _, _ = run(*arguments, list_checkpoints=listed)
    assert code == 0
    written = json.loads((tmp_path / "to" / "config.json").read_text())
    assert written == {"model_type": "mine", "dtype": "float32"}
