"""`from_pretrained` of transformers opens an exported checkpoint.

The model computes the same logits as during training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from everstep.checkpoints import open_checkpoint
from everstep.checkpoints.export import Exported, export_safetensors
from tests.integration.training.conftest import Scenarios
from tests.integration.training.scripts import TOKENS
from tests.unit.everstep.checkpoints.stored import store_payloads

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent transformers from contacting its hub, and from warning about the failed contact."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


def trained(scenarios: Scenarios, tmp_path: Path, kind: str) -> Path:
    """Train a model for two steps on two ranks, and return the manifest of its checkpoint."""
    options = {"kind": kind, "logits": str(tmp_path / "logits.npy")}
    scenarios.launch("transformers", 2, tmp_path, until=2, options=options, keep=tmp_path).results()
    payloads = [
        ((tmp_path / f"payload-{rank}").read_bytes(), json.loads((tmp_path / f"index-{rank}").read_text())[0])
        for rank in range(2)
    ]
    return store_payloads(tmp_path / "bucket", payloads)


def exported(manifest: Path, to: Path, **options: Any) -> Exported:
    with open_checkpoint(str(manifest)) as checkpoint:
        return export_safetensors(checkpoint, str(to), **options)


def logits_of(folder: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        found: np.ndarray = model(input_ids=TOKENS).logits.float().numpy()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero"])
def test_from_pretrained_opens_an_export_and_computes_the_same_logits(
    scenarios: Scenarios, tmp_path: Path, kind: str
) -> None:
    manifest = trained(scenarios, tmp_path, kind)
    result = exported(manifest, tmp_path / "to", file_bytes=8000)
    assert result.files[0] == "config.json"
    assert result.files[-1] == "model.safetensors.index.json"
    assert result.left_out == (("temperature",) if kind == "ddp" else ())
    assert np.array_equal(logits_of(tmp_path / "to"), np.load(tmp_path / "logits.npy"))
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM" if kind == "fsdp" else "GPT2LMHeadModel"]


def test_a_tied_parameter_is_written_once_and_a_dtype_is_what_from_pretrained_loads(
    scenarios: Scenarios, tmp_path: Path
) -> None:
    manifest = trained(scenarios, tmp_path, "ddp")
    exported(manifest, tmp_path / "half", dtype="bfloat16")
    with safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt", "lm_head.weight": "transformer.wte.weight"}
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert model.dtype == torch.bfloat16
    with open_checkpoint(str(manifest)) as checkpoint:
        raw = checkpoint.read(checkpoint.tensors["model/net.transformer.wte.weight"])
    expected = torch.frombuffer(raw, dtype=torch.float32).to(torch.bfloat16)
    assert torch.equal(model.lm_head.weight.detach().flatten(), expected)


def test_a_configuration_of_the_caller_replaces_that_of_the_checkpoint(scenarios: Scenarios, tmp_path: Path) -> None:
    """The caller passes a configuration that does not tie the two embeddings, unlike the configuration of the
    checkpoint.

    The export then contains both embeddings, because transformers reads both.
    """
    manifest = trained(scenarios, tmp_path, "ddp")
    with open_checkpoint(str(manifest)) as checkpoint:
        fields = json.loads(checkpoint.pretrained["net"])
    config = json.dumps({**fields, "tie_word_embeddings": False, "torch_dtype": "bfloat16"})
    exported(manifest, tmp_path / "to", config=config)
    found = json.loads((tmp_path / "to" / "config.json").read_text())
    assert (found["dtype"], "torch_dtype" in found) == ("float32", False)
    assert np.array_equal(logits_of(tmp_path / "to"), np.load(tmp_path / "logits.npy"))
