"""Determines how the local cloud behaves where AWS's documentation is silent (docs/aws.md).

`everstep aws-conformance` finds the answers by experiments in a real account, and writes them to a file. Without a
file, the local cloud uses the defaults, each the answer that is worse for Everstep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.rates import AUTO_SCALING, Rate

STORED: Final = Path(__file__).with_name("aws_answers.json")
"""Answers of the newest run against AWS. Missing before the first run."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class AwsAnswers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AWS's behaviour where its documentation is silent. Every default is an assumption."""

    pending_member_shows_protection: bool = False
    """Whether a Pending member of a group with NewInstancesProtectedFromScaleIn is shown as protected."""
    pending_member_is_protectable: bool = False
    """Whether SetInstanceProtection accepts a Pending member."""
    protection_is_all_or_nothing: bool = True
    """Whether SetInstanceProtection changes no member of a call if it refuses one of them."""
    protection_set_at: Literal["launch", "service"] = "launch"
    """Time at which a new member gets the group's NewInstancesProtectedFromScaleIn: at launch, or when it enters
    service.
    """
    ended_member_stays: bool = True
    """Whether an ended instance stays a member of its group while ReplaceUnhealthy is suspended."""
    hook_holds_ended_member: bool = True
    """Whether a lifecycle hook for terminations holds a member whose instance has already ended."""
    unknown_ids_named: Literal["one", "all"] = "one"
    """Whether the error InvalidInstanceID.NotFound names one or all of the unknown ids in a call."""
    visibility_seconds: Seconds = 10.0
    """Longest time until Describe operations show an instance or a change. The default of the fault `stale-view`."""
    topology_layers: Annotated[int, msgspec.Meta(ge=0, le=4)] = 3
    """Network nodes that DescribeInstanceTopology returns for an instance."""
    auto_scaling_rate: Rate = AUTO_SCALING
    """Rate of all calls of Auto Scaling together."""


class RecordedAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file of a conformance run."""

    asked_at: str
    """ISO 8601."""
    region: str
    instance_type: str
    answers: AwsAnswers
    observed: dict[str, dict[str, Any]] = {}
    """Details by question, which the local cloud does not read."""
    unanswered: dict[str, str] = {}
    """Reasons by question, whose fields in `answers` have their defaults."""


_RECORDED: Final = msgspec.json.Decoder(RecordedAnswers)


class UnusableAnswers(LocalCloudError):
    """The file with the answers of a conformance run does not exist or is invalid."""


def read(path: Path | None = None) -> AwsAnswers:
    """Return the answers in a file of `everstep aws-conformance`. None: of `STORED` if it exists, else the defaults.

    Raises UnusableAnswers if `path` does not exist, or the file has other content.
    """
    if path is None and not STORED.exists():
        return AwsAnswers()
    chosen = path or STORED
    try:
        return _RECORDED.decode(chosen.read_bytes()).answers
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableAnswers(f"{chosen} contains no answers of AWS: {error}") from error


def encode(recorded: RecordedAnswers) -> bytes:
    """Encode answers as the content of the file."""
    return msgspec.json.format(msgspec.json.encode(recorded), indent=1) + b"\n"
