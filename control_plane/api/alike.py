"""Copies the fields that a stored record and a response model share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final, get_args

from control_plane.api.schemas.common import Shape

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_STORED_AS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("drill_id", "entry_id", "event_id", "incident_id", "node_id", "note_id", "token_id"), ("id",)),
    "acknowledgement_time": ("acknowledged_at",),
    "agent_version": ("version",),
    "bytes": ("object_bytes", "payload_bytes"),
    "completion_time": ("completed_at",),
    "connection_time": ("connected_at",),
    "creation_time": ("created_at", "requested_at", "at"),
    "description": ("words",),
    "end_time": ("ended_at",),
    "expiration_time": ("expires_at",),
    "fleet_name": ("name",),
    "instance_id": ("node_id",),
    "last_modified_time": ("modified_at",),
    "pause_requested_time": ("pause_requested_at",),
    "purge_time": ("purge_at",),
    "revocation_time": ("revoked_at",),
    "stop_requested_time": ("stop_requested_at",),
    "strike_time": ("struck_at",),
    "taken_over_time": ("taken_over_at",),
    "time": ("at",),
    "training_end_time": ("ended_at",),
    "training_job_name": ("job_name", "name"),
    "training_start_time": ("started_at",),
    "verification_time": ("verified_at",),
}
"""By field of a response: the names that a stored record can have for it, unless the record uses the field's name."""


def alike(stored: DataclassInstance, shape: type[Shape], *others: str) -> dict[str, Any]:
    """Return the values of those fields of a response model that a stored record has, by name.

    The result omits the fields whose names are in `others`. The caller computes the values of these fields itself. An
    empty text becomes None if the response can omit the field.
    """
    found = {name: getattr(stored, attribute) for name, attribute in _shared(type(stored), shape) if name not in others}
    return {name: None if value == "" and _is_optional(shape, name) else value for name, value in found.items()}


@cache
def _shared(stored: type[DataclassInstance], shape: type[Shape]) -> tuple[tuple[str, str], ...]:
    has = {field.name for field in fields(stored)}
    names = {name: [each for each in (name, *_STORED_AS.get(name, ())) if each in has] for name in shape.model_fields}
    return tuple((name, found[0]) for name, found in names.items() if found)


def _is_optional(shape: type[Shape], name: str) -> bool:
    return type(None) in get_args(shape.model_fields[name].annotation)
