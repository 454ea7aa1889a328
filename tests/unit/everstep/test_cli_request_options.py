"""Options that come from the service's model set fields that the model allows."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import pytest
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from everstep.aws_models import DATA, SERVICE
from everstep.cli.request_options import FieldsOf
from tests.unit.everstep.test_cli_confirm import FLEET

MODEL = ServiceModel(json.loads(next((DATA / SERVICE).glob("*/service-2.json")).read_text()), SERVICE)
OF_THE_COMMAND = ("InputDataConfig", "ExpectedChanges")
"""Lists of structures, which the commands build."""
VALUES = {
    str: "a=b",
    int: 60,
    float: 0.5,
    bool: True,
    list[str]: ["a=s3://b/c"],
    datetime: datetime.fromisoformat("2026-03-01"),
}


def value_of(annotation: Any) -> Any:
    """Return a value as typer passes it for an option of this type."""
    kind, _none = annotation.__origin__.__args__
    return next(iter(kind)) if isinstance(kind, type) and issubclass(kind, StrEnum) else VALUES[kind]


def names(request: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the paths of all values of a request. A map counts as one value."""
    return {
        name
        for key, value in request.items()
        for name in (
            names(value, f"{prefix}{key}_")
            if isinstance(value, dict) and value != {"a": "s3://b/c"}
            else {prefix + key}
        )
    }


@pytest.mark.parametrize(
    "operation", ["CreateTrainingJob", "CreateFleet", "UpdateFleet", "PutProjectQuota", "ListTrainingJobs", "GetReport"]
)
def test_each_field_has_an_option_whose_value_the_model_accepts(operation: str) -> None:
    fields = FieldsOf(operation, dict.fromkeys(OF_THE_COMMAND, ""))
    request = fields.request({each.name: value_of(each.annotation) for each in fields.parameters()})
    assert names(request) == {each.name for each in fields.parameters()}
    members = MODEL.operation_model(operation).input_shape.members
    path = {name: "main" for name, member in members.items() if member.serialization.get("location") == "uri"}
    found = ParamValidator().validate({**path, **request}, MODEL.operation_model(operation).input_shape)
    assert found.generate_report() == ""


def test_a_field_without_a_name_has_no_option() -> None:
    fields = FieldsOf("GetReport", {"Project": "", "FleetName": "--fleet"})
    options = {each.name: each.annotation.__metadata__[0].default for each in fields.parameters()}
    assert "Project" not in options
    assert options["FleetName"] == "--fleet"
    assert options["StartTime"] == "--start-time"


def test_times_are_in_utc_and_what_is_not_given_is_not_sent() -> None:
    request = FieldsOf("GetReport").request({"StartTime": datetime.fromisoformat("2026-03-01"), "Period": None})
    assert request == {"StartTime": datetime(2026, 3, 1, tzinfo=UTC)}


def test_options_of_a_fleet_accept_both_values_in_any_case(run) -> None:
    words = ("--forbid-drills", "--hold-failed-instances", "--replica-encryption", "off", "--spare-probability", "0.9")
    _, _, _, calls = run("fleets", "update", "main", *words, update_fleet=FLEET)
    assert calls == [
        (
            "update_fleet",
            {
                "FleetName": "main",
                "AllowDrills": False,
                "HoldFailedInstances": True,
                "ReplicaEncryption": "Off",
                "SparePolicy": {"Probability": 0.9},
            },
        )
    ]


def test_a_list_keeps_the_commas_of_its_values(run) -> None:
    words = ("--allow-data", "s3://b/a,b/*", "--allow-data", "s3://c/*")
    quota = {"Project": "speech", "MaxPriority": 0}
    _, _, _, calls = run("quotas", "set", "speech", *words, put_project_quota=quota)
    assert calls == [("put_project_quota", {"Project": "speech", "AllowedData": ["s3://b/a,b/*", "s3://c/*"]})]
