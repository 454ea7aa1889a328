"""Exports adapters that PEFT has trained, or the whole model with its adapters merged into the weights.

    adapter_model.safetensors, adapter_config.json    what `PeftModel.from_pretrained(base, folder)` opens
    the files of `save_pretrained`                    with `merge`: what `AutoModel….from_pretrained(folder)` opens

PEFT and transformers themselves write these files: the export builds the model without memory for its weights, and
gives it the tensors of the checkpoint. Adapters need none of the frozen weights.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from everstep.checkpoints.checkpoint import Checkpoint
from everstep.checkpoints.errors import CheckpointError, IncompleteTensor
from everstep.checkpoints.export import FIELDS, PREFIX, Exported, check_empty, files_beside, unpacked
from everstep.checkpoints.stores import store_of
from everstep.checkpoints.torch_files import tensor_of
from everstep.protocol.errors import UNDECODABLE
from everstep.protocol.slot_values import ADAPTER_FILE, BASE_FILE


def export_adapters(
    checkpoint: Checkpoint,
    to: str,
    *,
    merge: bool = False,
    dtype: str | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Exported:
    """Write the adapters of a checkpoint's model, or the merged model.

    Args:
        checkpoint: an open checkpoint of a model with adapters of PEFT.
        to: folder, as a path or as `s3://bucket/prefix`. It must not hold an exported model.
        merge: write the whole model, with the adapters merged into its weights. It needs the memory of the model.
        dtype: floating point type to which all tensors are converted, such as `bfloat16`. None: as in the checkpoint.
        progress: called with loaded and total bytes after each tensor.

    Returns:
        The written files.

    Raises:
        CheckpointError: the checkpoint has no adapters, the installed transformers has no class of the model, the kind
            of adapters cannot be merged, the folder holds a model, or a file cannot be written.
    """
    path = next((key.removesuffix(f":{ADAPTER_FILE}") for key in checkpoint.files if key.endswith(ADAPTER_FILE)), None)
    if path is None or f"{path}:{BASE_FILE}" not in checkpoint.files:
        raise CheckpointError("the checkpoint has no adapters of PEFT around a model of transformers")
    check_empty(to)
    model = _model(
        _fields(checkpoint.files[f"{path}:{BASE_FILE}"]), _fields(checkpoint.files[f"{path}:{ADAPTER_FILE}"])
    )
    prefix = f"{PREFIX}{path}." if path else PREFIX
    loaded = _load(checkpoint, _sources(checkpoint, prefix, model, is_whole=merge), dtype, progress)
    model.load_state_dict(loaded, strict=False, assign=True)
    if merge:
        try:
            model = model.merge_and_unload()
        except Exception as error:
            raise CheckpointError(f"these adapters cannot be merged into the weights: {error}") from error
    with tempfile.TemporaryDirectory(prefix="everstep-export-") as folder:
        model.save_pretrained(folder)
        for name, data in files_beside(checkpoint, path).items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(data)
        files = sorted(each for each in Path(folder).rglob("*") if each.is_file() and each.name != "README.md")
        store, target = store_of(to.rstrip("/") or "/")
        names = [str(each.relative_to(folder)) for each in files]
        for name, file in zip(names, files, strict=True):
            data = file.read_bytes()
            store.write(f"{target}/{name}" if target else name, [data], len(data))
    return Exported(tuple(names), len(loaded), sum(each.nbytes for each in loaded.values()))


def _fields(data: bytes) -> dict[str, Any]:
    try:
        return FIELDS.decode(unpacked(data))
    except UNDECODABLE as error:
        raise CheckpointError(f"a configuration of the checkpoint is no JSON object: {error}") from error


def _model(base: Mapping[str, Any], adapter: Mapping[str, Any]) -> Any:
    """Return the model with adapters, without memory for its tensors."""
    name = base["architectures"][0]
    kind = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if kind is None or not is_model or base["model_type"] not in CONFIG_MAPPING:
        raise CheckpointError(f"the installed transformers has no class {name}; install the version of the job")
    known = PEFT_TYPE_TO_CONFIG_MAPPING[adapter["peft_type"]]
    # The tensors come from the checkpoint. A configuration of the job must not make PEFT load texts or models by name.
    fields = known.__dataclass_fields__.keys() - {"prompt_tuning_init", "tokenizer_name_or_path"}
    config: Any = known(**{key: value for key, value in adapter.items() if key in fields})
    config.inference_mode = False  # PEFT would freeze the adapters.
    is_pruned = adapter["peft_type"] == "ADALORA"
    if is_pruned:  # AdaLoRA writes this pattern when it removes ranks. The new model has all ranks.
        config.rank_pattern = None
    of_base: Any = CONFIG_MAPPING[base["model_type"]]
    with torch.device("meta"):
        frozen = kind(of_base.from_dict(dict(base)))
    adapted: Any = peft.get_peft_model
    model = adapted(frozen, config)
    if is_pruned:
        config.rank_pattern = adapter["rank_pattern"]
    return model


def _sources(checkpoint: Checkpoint, prefix: str, model: Any, *, is_whole: bool) -> dict[str, str]:
    """Return the tensor of the checkpoint for each tensor of the model: for all, or for all that are not frozen.

    A model can have a tensor under several names, and a checkpoint has only one of them.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    found: dict[str, str] = {}
    for aliases in names.values():
        if is_whole or not frozen.issuperset(aliases):
            known = next((each for each in aliases if prefix + each in checkpoint.tensors), aliases[0])
            found |= dict.fromkeys(aliases, prefix + known)
    return found


def _load(
    checkpoint: Checkpoint, names: Mapping[str, str], dtype: str | None, progress: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for number, (name, source) in enumerate(names.items(), 1):
        if source in checkpoint.incomplete:
            raise IncompleteTensor(checkpoint.incomplete[source])
        if source not in checkpoint.tensors:
            raise CheckpointError(
                f"the checkpoint has no tensor {source.removeprefix(PREFIX)}, which these adapters need"
            )
        tensor = tensor_of(checkpoint, checkpoint.tensors[source])
        loaded[name] = tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor
        progress(number, len(names))
    return loaded
