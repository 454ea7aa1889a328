"""The client's waiters, which poll until an object reaches a state.

Invariant: a waiter never waits for a state that can no longer occur. In each final state, it succeeds or fails.
"""

from __future__ import annotations

from typing import Any

import jmespath

from control_plane.contract.errors import ContractError

Json = dict[str, Any]

DELAY_SECONDS = 5
TWELVE_HOURS = 43_200
"""Limit if the caller sets none."""


def waiters(model: Json) -> Json:
    """Return waiters-2.json. Raises ContractError if a waiter uses something that the service model lacks."""
    found = {
        "TrainingJobRunning": _job(
            "Waits until the ranks train. Fails when the job has ended or is being stopped.",
            _matches("SecondaryStatus", "Training"),
            *(
                _matches("TrainingJobStatus", status, state="failure")
                for status in ("Completed", "Failed", "Stopped", "Stopping")
            ),
        ),
        "TrainingJobRecovered": _job(
            "Waits until no incident is open and the ranks train, or the job has completed. Fails when the job has "
            "ended another way. A failure that is not detected yet does not count: after you hurt a job, wait for "
            "its incident first.",
            _matches("SecondaryStatus == 'Training' && OpenIncidentCount == `0`", True),
            _matches("TrainingJobStatus", "Completed"),
            *(_matches("TrainingJobStatus", status, state="failure") for status in ("Failed", "Stopped")),
        ),
        "TrainingJobCompletedOrStopped": _job(
            "Waits until the job has completed or was stopped and its nodes are released, so that it can be "
            "deleted. Fails when the job has failed.",
            _matches(
                "(TrainingJobStatus == 'Completed' || TrainingJobStatus == 'Stopped') && AssignedNodeCount == `0`", True
            ),
            _matches("TrainingJobStatus", "Failed", state="failure"),
        ),
        "TrainingJobPaused": _job(
            "Waits until a paused job has released its nodes. Fails when the job has ended or is being stopped.",
            _matches("SecondaryStatus", "Paused"),
            *(
                _matches("TrainingJobStatus", status, state="failure")
                for status in ("Completed", "Failed", "Stopped", "Stopping")
            ),
        ),
        "FleetReady": _waiter(
            "DescribeFleet",
            "Waits until every desired node of the fleet is connected; a fleet without desired nodes is ready at "
            "once. Fails when the fleet is frozen or being deleted.",
            _matches(
                "FleetStatus == 'active' && ConnectedNodeCount >= DesiredNodeCount && DesiredNodeCount >= "
                "MinNodeCount && "
                "(DesiredNodeCount > `0` || SpareCount == `0`)",
                True,
            ),
            *(_matches("FleetStatus", status, state="failure") for status in ("frozen", "deleting")),
        ),
        "DrillsOver": _waiter(
            "DescribeTrainingJob",
            "Waits until the result of every drill of the job is known.",
            _matches("OpenDrillId == `null`", True),
        ),
        "CheckpointAvailable": _waiter(
            "ListCheckpoints",
            "Waits until the job has a complete checkpoint in S3. With MinStep, as CreateCheckpoint returned it, "
            "the checkpoint has that step or a later one. Fails when the job has ended without it.",
            _matches("length(Checkpoints[?Status=='Complete']) > `0`", True),
            *(_matches("TrainingJobStatus", status, state="failure") for status in ("Completed", "Failed", "Stopped")),
        ),
    }
    for name, waiter in found.items():
        _check(model, name, waiter)
    return {"version": 2, "waiters": found}


def _job(description: str, *acceptors: Json) -> Json:
    return _waiter("DescribeTrainingJob", description, *acceptors)


def _waiter(operation: str, description: str, *acceptors: Json) -> Json:
    described = {
        "operation": operation,
        "description": description,
        "delay": DELAY_SECONDS,
        "maxAttempts": TWELVE_HOURS // DELAY_SECONDS,
    }
    return {**described, "acceptors": list(acceptors)}


def _matches(path: str, value: object, *, state: str = "success") -> Json:
    return {"matcher": "path", "argument": path, "expected": value, "state": state}


def _check(model: Json, name: str, waiter: Json) -> None:
    operation = model["operations"].get(waiter["operation"])
    if operation is None:
        raise ContractError(f"the waiter {name} asks for {waiter['operation']}, which is no operation")
    reachable = _reachable(model, operation["output"]["shape"], set())
    for acceptor in waiter["acceptors"]:
        parsed = jmespath.compile(acceptor["argument"]).parsed
        for field in _fields(parsed):
            if not any(field in shape.get("members", {}) for shape in reachable):
                raise ContractError(f"the waiter {name} looks at {field}, which {waiter['operation']} does not answer")
        for field, value in [
            *_compared(parsed),
            *([(parsed["value"], acceptor["expected"])] if parsed["type"] == "field" else []),
        ]:
            shapes = [
                model["shapes"][shape["members"][field]["shape"]]
                for shape in reachable
                if field in shape.get("members", {})
            ]
            if all(value not in shape.get("enum", [value]) for shape in shapes):
                raise ContractError(f"the waiter {name} waits for {field} to be {value!r}, which it never is")


def _fields(node: Json) -> list[str]:
    own = [node["value"]] if node["type"] == "field" else []
    return own + [field for child in node["children"] if isinstance(child, dict) for field in _fields(child)]


def _compared(node: Json) -> list[tuple[str, object]]:
    """Return each field that a JMESPath expression compares with a literal, paired with this literal."""
    children = [child for child in node["children"] if isinstance(child, dict)]
    if node["type"] == "comparator" and [child["type"] for child in children] == ["field", "literal"]:
        return [(children[0]["value"], children[1]["value"])]
    return [found for child in children for found in _compared(child)]


def _reachable(model: Json, name: str, seen: set[str]) -> list[Json]:
    if name in seen:
        return []
    seen.add(name)
    shape = model["shapes"][name]
    inner = [*shape.get("members", {}).values(), *(shape[part] for part in ("member", "value") if part in shape)]
    return [shape, *(found for reference in inner for found in _reachable(model, reference["shape"], seen))]
