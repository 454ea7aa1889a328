"""Finds the configurations of registered models from Hugging Face's transformers.

When a user exports a checkpoint, the export writes these configurations as `config.json`. The module recognizes models
by their attribute `config` and does not import transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch.distributed.fsdp import FSDPModule

from everstep.training.module_tree import canonical_name


def pretrained_configs(roots: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """Return the content of `config.json` of each transformers model, by the model's path in parameter names.

    `init` calls it once. A model inside another transformers model has no entry of its own.

    Args:
        roots: the registered models and engines by name. A single one has the empty name.

    Returns:
        JSON texts by path. Empty if no registered model comes from transformers.
    """
    found: dict[str, str] = {}
    for name, root in roots.items():
        for raw, module in root.named_modules():
            path = ".".join(part for part in (name, canonical_name(raw)) if part)
            if any(not known or path == known or path.startswith(f"{known}.") for known in found):
                continue
            # Use `vars`, because `getattr` on a module of `torch.compile` returns the config of the wrapped module.
            to_json = getattr(vars(module).get("config"), "to_json_string", None)
            if callable(to_json):
                found[path] = _described(module, str(to_json()))
    return found


def _described(module: torch.nn.Module, config: str) -> str:
    """Return a configuration with the name of the model's class, as `save_pretrained` adds it."""
    fields = json.loads(config)
    # `fully_shard` replaces a module's class by a subclass, so find the original class.
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return json.dumps({**fields, "architectures": [kind.__name__]})
