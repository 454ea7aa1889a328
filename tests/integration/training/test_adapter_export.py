"""PEFT opens exported adapters, and transformers the merged model. Both compute what the trained model computes."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import everstep.training
from everstep.checkpoints import open_checkpoint
from everstep.checkpoints.adapters import export_adapters
from everstep.checkpoints.errors import CheckpointError
from everstep.checkpoints.export import Exported, export_safetensors, files_beside, has_adapters
from tests.integration.training.scripts import keep_payload
from tests.integration.training.trainer_scripts import TOKENS, llama, tokenizer
from tests.unit.everstep.checkpoints.stored import store_payloads

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    # PEFT reads attributes of models that transformers has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning"),
]

IDS = torch.arange(3, 11).reshape(1, 8)
TUNERS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "ADALORA": {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "total_step": 4, "target_modules": ["q_proj"]},
    "IA3": {"target_modules": ["q_proj"], "feedforward_modules": []},
    "VERA": {"r": 2, "target_modules": ["q_proj"]},
    "PREFIX_TUNING": {"num_virtual_tokens": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4]},
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)


def trained(kind: str, folder: Path) -> tuple[Path, torch.Tensor]:
    """Train adapters for some steps. Return the manifest of a checkpoint, and the logits of the trained model."""
    from peft import PeftType, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    torch.manual_seed(5)
    base = llama()
    base.generation_config.max_new_tokens = 7
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](task_type="CAUSAL_LM", **TUNERS[kind])
    model: Any = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.3)
    session = everstep.training.init(model=model, optimizer=optimizer, tokenizer=tokenizer())
    session.restore()
    for step in range(1, 5):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        if kind == "ADALORA":
            model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        session.boundary()
    keep_payload(session, folder, 0)
    session.close()
    payload = (folder / "payload-0").read_bytes()
    return store_payloads(folder / "bucket", [(payload, json.loads((folder / "index-0").read_text())[0])]), logits(
        model
    )


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def exported(manifest: Path, to: Path, **options: Any) -> Exported:
    with open_checkpoint(str(manifest)) as checkpoint:
        assert has_adapters(checkpoint)
        return export_adapters(checkpoint, str(to), **options)


@pytest.mark.parametrize("kind", sorted(TUNERS))
def test_peft_opens_exported_adapters(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    manifest, expected = trained(kind, tmp_path)
    result = exported(manifest, tmp_path / "to")
    files = {"adapter_config.json", "adapter_model.safetensors", "generation_config.json", "tokenizer.json"}
    assert files <= set(result.files)
    assert "config.json" not in result.files
    model = PeftModel.from_pretrained(_base(), tmp_path / "to")
    # AdaLoRA leaves out the ranks that it has removed, so the sums have another order.
    assert torch.allclose(logits(model), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["LORA", "IA3"])
def test_transformers_opens_the_merged_model(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest, expected = trained(kind, tmp_path)
    exported(manifest, tmp_path / "to", merge=True)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert model.generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "to").vocab_size == TOKENS


def test_what_cannot_be_merged_is_refused_and_a_second_export_too(tmp_path: Path) -> None:
    manifest, _ = trained("PREFIX_TUNING", tmp_path)
    with pytest.raises(CheckpointError, match="cannot be merged"):
        exported(manifest, tmp_path / "to", merge=True)
    exported(manifest, tmp_path / "to")
    with pytest.raises(CheckpointError, match="already holds an exported model"):
        exported(manifest, tmp_path / "to")


def test_an_export_of_all_tensors_writes_no_configuration_that_they_do_not_fit(tmp_path: Path) -> None:
    manifest, _ = trained("LORA", tmp_path)
    with open_checkpoint(str(manifest)) as checkpoint:
        files = export_safetensors(checkpoint, str(tmp_path / "all")).files
    assert "model.safetensors" in files
    assert "config.json" not in files


@pytest.mark.security
@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../b", "a/b/c", ".bashrc"])
def test_a_file_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="names a file"):
        files_beside(holding({f":{name}": zlib.compress(b"x")}), "")


@pytest.mark.security
@pytest.mark.parametrize(
    ("data", "refusal"), [(zlib.compress(bytes(64 * 2**20)), "more than"), (b"no zlib", "damaged")]
)
def test_a_file_that_does_not_unpack_is_refused(data: bytes, refusal: str) -> None:
    with pytest.raises(CheckpointError, match=refusal):
        files_beside(holding({":a.json": data}), "")


def holding(files: dict[str, bytes]) -> Any:
    """Return what `files_beside` reads of a checkpoint."""
    return SimpleNamespace(files=files)


def _base() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained("base", dtype=torch.float32)
