"""Copies the fields that a stored record and a response model share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, TypeVar, get_args

from control_plane.api.schemas.common import Shape

Response = TypeVar("Response", bound=Shape)
_STORED_AS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("drill_id", "entry_id", "event_id", "incident_id", "node_id", "note_id", "token_id"), ("id",)),
    "acknowledgement_time": ("acknowledged_at",),
    "agent_version": ("version",),
    "bytes": ("object_bytes", "payload_bytes"),
    "cause": ("what",),
    "cgroup_limit_bytes": ("limit_bytes",),
    "completion_time": ("completed_at",),
    "connection_time": ("connected_at",),
    "creation_time": ("created_at", "requested_at", "at"),
    "damaged_steps": ("wrong_steps",),
    "description": ("words",),
    "drill_status": ("state",),
    "drill_type": ("kind",),
    "end_time": ("ended_at", "end"),
    "expiration_time": ("expires_at",),
    "failed_attempt_count": ("failed_count",),
    "fleet_name": ("name",),
    "image_creation_time": ("image_created_at",),
    "instance_id": ("node_id",),
    "is_out_of_capacity": ("is_shortage",),
    "kept_step": ("kept",),
    "last_modified_time": ("modified_at",),
    "last_time": ("last_at",),
    "message": ("words", "detail", "text"),
    "metric_name": ("name",),
    "missing_node_count": ("missing_count",),
    "next_attempt_time": ("next_attempt_at",),
    "node_status": ("state",),
    "pause_requested_time": ("pause_requested_at",),
    "pause_time": ("paused_at",),
    "peak_resident_bytes": ("peak_bytes",),
    "purge_time": ("purge_at",),
    "reason": ("why",),
    "reboot": ("reboots",),
    "repeated_seconds": ("seconds",),
    "revision": ("number",),
    "revocation_time": ("revoked_at",),
    "start_time": ("started_at", "since", "start"),
    "stop_requested_time": ("stop_requested_at",),
    "stream": ("kind",),
    "strike_time": ("struck_at",),
    "taken_over_time": ("taken_over_at",),
    "time": ("at",),
    "training_end_time": ("ended_at",),
    "training_job_name": ("job_name", "name"),
    "training_start_time": ("started_at",),
    "verification_time": ("verified_at",),
}
"""Other names in stored records, by field of a response."""


def shaped(stored: Any, shape: type[Response], **others: Any) -> Response:
    """Return a response model with the values of a stored record. `others` replace or complement these values."""
    return shape(**alike(stored, shape, *others), **others)


def alike(stored: Any, shape: type[Shape], *others: str) -> dict[str, Any]:
    """Return the values of a response model's fields that a stored record has, without `others`.

    An empty text becomes None if the response can omit the field. The model converts Unix seconds to a time.
    """
    found = {
        name: getattr(stored, attribute) for name, attribute in _shared(stored.__class__, shape) if name not in others
    }
    return {name: None if value == "" and _is_optional(shape, name) else value for name, value in found.items()}


@cache
def _shared(stored: type[Any], shape: type[Shape]) -> tuple[tuple[str, str], ...]:
    has = {field.name for field in fields(stored)} if is_dataclass(stored) else {*stored.__struct_fields__}
    names = {name: [each for each in (name, *_STORED_AS.get(name, ())) if each in has] for name in shape.model_fields}
    return tuple((name, found[0]) for name, found in names.items() if found)


def _is_optional(shape: type[Shape], name: str) -> bool:
    return type(None) in get_args(shape.model_fields[name].annotation)
