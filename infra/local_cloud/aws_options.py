"""Defines the options of the local AWS, which runs in a process of its own."""

from __future__ import annotations

from typing import Final

import msgspec

from infra.local_cloud.faults import Conditions


class AwsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the local AWS. `up` passes them as JSON to the command `serve`."""

    nodes_directory: str
    ready_file: str
    """File that the process writes once it accepts requests."""
    keys_file: str
    """File with the only long-lived access key that the local AWS accepts. Instances receive it."""
    conditions: Conditions
    instance_environment: dict[str, str] = {}
    """Additional variables of every instance."""
    seed: int = 0
    network_name: str = ""
    """Name of the virtual network. Empty if instances share this machine's loopback."""
    aws_answers: str | None = None
    """File of `everstep aws-conformance`. None: the newest stored answers, if any."""


AWS_OPTIONS: Final = msgspec.json.Decoder(AwsOptions)
