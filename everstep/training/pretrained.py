"""Finds what belongs beside the exported weights of a model from Hugging Face's libraries.

It recognizes models by their classes and attributes, and imports neither transformers nor PEFT.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule

from everstep.protocol.slot_values import ADAPTER_FILE, BASE_FILE, GENERATION_FILE
from everstep.training.module_tree import canonical_name

MAX_FILE_BYTES: Final = 32 * 1024 * 1024
"""Exports write no larger file of a tokenizer."""


class Pretrained:
    """The configurations and files of the registered models. A single one has the empty name."""

    def __init__(self, roots: Mapping[str, torch.nn.Module], tokenizer: Any = None) -> None:
        self.configs: dict[str, str] = {}
        """`config.json` of each model whose tensors fit its configuration, by path."""
        self._files: dict[str, bytes] = {}
        self._adapted: dict[str, Any] = {}
        """The models with adapters of PEFT, by path."""
        for name, root in roots.items():
            for raw, module in root.named_modules():
                path = ".".join(part for part in (name, canonical_name(raw)) if part)
                known = (*self.configs, *self._adapted)
                if not any(not each or path == each or path.startswith(f"{each}.") for each in known):
                    self._add(path, module)
        if tokenizer is not None and (self.configs or self._adapted):
            path = next(iter((*self.configs, *self._adapted)))
            self._files |= {f"{path}:{file}": data for file, data in _files_of(tokenizer).items()}

    def files(self) -> dict[str, bytes]:
        """Return the further files of the models, as `SlotValues.files`."""
        # A tuner can change its configuration while it trains.
        adapters = {f"{path}:{ADAPTER_FILE}": _adapter_config(model) for path, model in self._adapted.items()}
        return self._files | adapters if adapters else self._files

    def _add(self, path: str, module: Any) -> None:
        # Use `vars`, because `getattr` on a module of `torch.compile` returns the attributes of the wrapped module.
        if _is_of("peft", module) and hasattr(module, "get_base_model"):
            self._adapted[path] = module
            base = module.get_base_model()
            if (config := _config_of(base)) is not None:
                self._files[f"{path}:{BASE_FILE}"] = zlib.compress(config.encode())
            self._add_generation(path, base)
        elif (config := _config_of(module)) is not None and not any(_is_of("peft", each) for each in module.modules()):
            self.configs[path] = config
            self._add_generation(path, module)

    def _add_generation(self, path: str, module: Any) -> None:
        if callable(to_json := getattr(vars(module).get("generation_config"), "to_json_string", None)):
            self._files[f"{path}:{GENERATION_FILE}"] = zlib.compress(str(to_json()).encode())


def _is_of(package: str, module: object) -> bool:
    return any(kind.__module__.partition(".")[0] == package for kind in type(module).__mro__)


def _config_of(module: Any) -> str | None:
    """Return the configuration with the name of the model's class, as `save_pretrained` writes it."""
    to_json = getattr(vars(module).get("config"), "to_json_string", None)
    # Other classes can have a configuration, too: a wrapper of a model, whose tensors have other names.
    if not callable(to_json) or not any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__):
        return None
    # `fully_shard` replaces a module's class by a subclass, so find the original class.
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return json.dumps({**json.loads(str(to_json())), "architectures": [kind.__name__]})


def _adapter_config(model: Any) -> bytes:
    config = model.peft_config[model.active_adapter if isinstance(model.active_adapter, str) else "default"]
    fields = {key: value for key, value in config.to_dict().items() if key != "runtime_config"}
    return zlib.compress(json.dumps({**fields, "inference_mode": True}, default=_listed).encode())


def _listed(value: object) -> object:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _files_of(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="everstep-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        found = [each for each in sorted(Path(folder).rglob("*")) if each.is_file()]
        kept = [each for each in found if each.stat().st_size <= MAX_FILE_BYTES]
        return {str(each.relative_to(folder)): zlib.compress(each.read_bytes()) for each in kept}
