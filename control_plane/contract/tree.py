"""The generated files and their paths in the checkout. Unchanged files keep their modification times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from control_plane.api.surface import API_VERSION, least_roles, make_surface
from control_plane.contract import reference
from control_plane.contract.service_model import endpoint_rules, paginators, service_model
from control_plane.contract.stubs import stubs
from control_plane.contract.typescript import typescript
from control_plane.contract.waiters import waiters

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = Path("everstep/data/everstep") / API_VERSION
REFERENCE: Final = Path("docs/reference")


def files() -> Mapping[Path, str]:
    """Return the text of every generated file, by path relative to the checkout."""
    document = make_surface().openapi()
    model = service_model(document)
    pages = paginators(model)
    waits = waiters(model)
    return {
        Path("docs/openapi.json"): _json(document),
        MODEL / "service-2.json": _json(model),
        MODEL / "paginators-1.json": _json(pages),
        MODEL / "waiters-2.json": _json(waits),
        MODEL / "endpoint-rule-set-1.json": _json(endpoint_rules()),
        Path("everstep/service.pyi"): stubs(model, pages, waits),
        Path("web/src/contract.ts"): typescript(model, least_roles()),
        **{REFERENCE / name: text for name, text in reference.pages(document, model, pages, waits).items()},
    }


def stale(root: Path) -> list[Path]:
    """Return the generated files that are missing or out of date, relative to the checkout's root."""
    return [path for path, text in files().items() if not (root / path).exists() or (root / path).read_text() != text]


def write(root: Path) -> None:
    """Write the generated files that are missing or out of date."""
    for path, text in files().items():
        if not (root / path).exists() or (root / path).read_text() != text:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
