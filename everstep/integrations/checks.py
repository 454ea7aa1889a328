"""Checks options that the integrations of several frameworks refuse. This module imports no framework but torch."""

from __future__ import annotations

from typing import Any

import torch

from everstep.integrations.errors import UnsupportedOption


def check_optimizer(optimizer: Any) -> None:
    """Check that Everstep's guard can run before the optimizer's step.

    Args:
        optimizer: an optimizer of torch without a framework's wrapper, or None.

    Raises:
        UnsupportedOption: torch.compile compiles the step as one graph, so the guard, which is Python code, cannot run.
    """
    step = getattr(optimizer, "step", None)
    cells = getattr(step, "__closure__", None) or ()
    if hasattr(step, "_torchdynamo_orig_callable") and any(_is_full_graph(cell.cell_contents) for cell in cells):
        raise UnsupportedOption(
            "torch.compile(optimizer.step, fullgraph=True)",
            "Everstep waits before the update for the copy of the state, which is not possible inside one graph",
            "Remove fullgraph=True.",
        )


def _is_full_graph(context: object) -> bool:
    """Return whether a context of torch.compile was made with `fullgraph=True`."""
    return getattr(context, "fullgraph", False) is True


def check_engine(engine: Any) -> None:
    """Check the offload of a DeepSpeed engine. `everstep.training.init` checks the engine's other options.

    Args:
        engine: the engine that the framework has created.

    Raises:
        UnsupportedOption: the engine keeps parameters in host memory. Everstep has no test that resumes such a job.
    """
    offload = engine.zero_offload_param()
    if offload is not None and not str(offload.device).endswith("none"):
        raise UnsupportedOption(
            "zero_optimization.offload_param",
            "no test resumes parameters in host memory",
            "Remove it. The optimizer's state may stay in host memory (offload_optimizer with the device cpu).",
        )


def modules_of(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return all modules of a model. Another result for the same model later means that the script has changed it."""
    return tuple(model.modules())
