"""Converts the configuration objects of a job (`CheckpointConfig`, …) to attributes of its spec, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from typing import Any, Final, TypeVar

from control_plane.api.schemas.common import Request
from control_plane.db.jobs import SavedJobSpec

Config = TypeVar("Config", bound=Request)

_RENAMED: Final = {
    "at_step": "rehearsal_at_step",
    "every_steps": "checkpoint_every_steps",
    "interval_in_seconds": "checkpoint_interval_seconds",
    "keep_every_steps": "checkpoint_keep_every_steps",
    "max_age_in_seconds": "checkpoint_max_age_seconds",
    "max_count": "checkpoint_max_count",
    "max_overhead": "checkpoint_max_overhead",
    "max_pending_time_in_seconds": "max_pending_seconds",
    "max_runtime_in_seconds": "max_runtime_seconds",
    "mode": "rehearsal_mode",
    "max_upload_bytes_per_second": "checkpoint_max_bytes_per_second",
    "max_uploads_in_flight": "checkpoint_max_uploads",
    "on_difference": "rehearsal_on_difference",
    "on_notice": "checkpoint_on_notice",
    "patience_in_seconds": "patience_seconds",
    "steps": "rehearsal_steps",
    "trash_hours": "checkpoint_trash_hours",
}
"""Attributes with another name than their field."""
_ATTRIBUTES: Final = {field.name: field.default for field in fields(SavedJobSpec)}


def settings_of(config: Request) -> Iterator[tuple[str, str, Any]]:
    """Yield field, attribute and value of each set setting.

    0 becomes None, because 0 in an update removes the setting.
    """
    for field in type(config).model_fields:
        attribute, value = _RENAMED.get(field, field), getattr(config, field)
        if value is not None and attribute in _ATTRIBUTES:
            default = _ATTRIBUTES[attribute]
            if isinstance(default, StrEnum):
                value = type(default)(value)
            yield field, attribute, value or None if default is None else value


def stored(*configs: Request) -> dict[str, Any]:
    """Return the attributes that configuration objects determine, with their defaults."""
    return {attribute: value for config in configs for _, attribute, value in settings_of(config)}


def configured(kind: type[Config], spec: SavedJobSpec, **others: Any) -> Config:
    """Return a configuration object of a job. `others` are fields that differ from their attribute."""
    alike = {name: getattr(spec, _RENAMED.get(name, name)) for name in kind.model_fields if name not in others}
    plain = {name: value.value if isinstance(value, StrEnum) else value for name, value in alike.items()}
    return kind(**plain, **others)
