"""Determines how the local cloud behaves where AWS's documentation is silent.

Each field of `AwsAnswers` is one such behaviour of AWS, the answer to a *question* such as "After which time does a new
instance appear?". `everstep aws-conformance` finds the answers by experiments in a real account, and writes them to a
file. The local cloud reads this file. Without a file, it uses the defaults. Each default is the answer that is worse
for Everstep. docs/aws.md explains each question.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.rates import AUTO_SCALING, Rate

STORED: Final = Path(__file__).with_name("aws_answers.json")
"""The answers of the newest run against AWS. The file does not exist before the first run."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class AwsAnswers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AWS's behaviour where its documentation is silent, one behaviour per field. Every default is an assumption."""

    pending_member_shows_protection: bool = False
    """Whether a Pending member of a group with NewInstancesProtectedFromScaleIn is shown as protected."""
    pending_member_is_protectable: bool = False
    """Whether SetInstanceProtection accepts a Pending member."""
    protection_is_all_or_nothing: bool = True
    """Whether SetInstanceProtection changes no member of a call if it refuses one of them."""
    protection_set_at: Literal["launch", "service"] = "launch"
    """Time at which a new member gets the group's value of NewInstancesProtectedFromScaleIn: its launch, or the moment
    when it enters service.
    """
    ended_member_stays: bool = True
    """Whether an ended instance stays a member of its group while ReplaceUnhealthy is suspended."""
    hook_holds_ended_member: bool = True
    """Whether a lifecycle hook for terminations holds a member whose instance has already ended."""
    unknown_ids_named: Literal["one", "all"] = "one"
    """Whether the error InvalidInstanceID.NotFound names one or all of the unknown ids in a call."""
    visibility_seconds: Seconds = 10.0
    """Longest time until EC2's Describe operations show a new or changed instance.

    The fault `stale-view` delays changes by this time, unless the fault itself sets a delay.
    """
    topology_layers: Annotated[int, msgspec.Meta(ge=0, le=4)] = 3
    """Number of network nodes that DescribeInstanceTopology returns for an instance."""
    auto_scaling_rate: Rate = AUTO_SCALING
    """Rate limit of all calls of Auto Scaling together."""


class RecordedAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file that a conformance run writes."""

    asked_at: str
    """Time of the conformance run in ISO 8601."""
    region: str
    instance_type: str
    answers: AwsAnswers
    observed: dict[str, dict[str, Any]] = {}
    """Observed details of each answer, by the question's name. The local cloud does not read them."""
    unanswered: dict[str, str] = {}
    """Reason why a question has no answer, by the question's name. Its fields in `answers` have their defaults."""


_RECORDED: Final = msgspec.json.Decoder(RecordedAnswers)


class UnusableAnswers(LocalCloudError):
    """The file with the answers of a conformance run does not exist or is invalid."""


def read(path: Path | None = None) -> AwsAnswers:
    """Return the stored answers about AWS's behaviour.

    Args:
        path: a file that `everstep aws-conformance` wrote. None selects the file `STORED` if it exists, else the
            defaults.

    Returns:
        The stored answers, or the defaults.

    Raises:
        UnusableAnswers: `path` does not exist, or the file has other content. The message contains the path.
    """
    if path is None and not STORED.exists():
        return AwsAnswers()
    chosen = path or STORED
    try:
        return _RECORDED.decode(chosen.read_bytes()).answers
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableAnswers(f"{chosen} contains no answers of AWS: {error}") from error


def encode(recorded: RecordedAnswers) -> bytes:
    """Encode the answers of a conformance run as the content of the file of answers."""
    return msgspec.json.format(msgspec.json.encode(recorded), indent=1) + b"\n"
