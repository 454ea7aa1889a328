"""Reads secrets and assumes roles with the node's own AWS permissions.

Invariant: nothing is cached. Every call creates a new client, so changed credentials take effect immediately.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing

from worker.errors import StoreRefused
from worker.storage.aws import ROLE_SECONDS, JobPrincipal, RoleKeys, SecretPlace, aws_client, aws_errors
from worker.storage.s3 import S3ObjectStore, s3_store


class NodeAws:
    """Implements `Aws` with the node's own permissions."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment

    def secret(self, reference: str, keys: RoleKeys | None) -> str:
        place = SecretPlace.of(reference)
        with (
            aws_errors(reference),
            closing(
                aws_client(
                    place.service, self._environment, region=place.region, keys=None if keys is None else lambda: keys
                )
            ) as client,
        ):
            if place.service == "ssm":
                return str(client.get_parameter(Name=place.name, WithDecryption=True)["Parameter"]["Value"])
            answer = client.get_secret_value(SecretId=place.name)
        if "SecretString" not in answer:
            raise StoreRefused(
                f"secret {reference} is binary, but an environment variable is text. Store the secret as SecretString."
            )
        return str(answer["SecretString"])

    def assume_role(self, principal: JobPrincipal) -> RoleKeys:
        with aws_errors(principal.role_arn), closing(aws_client("sts", self._environment)) as client:
            made = client.assume_role(
                RoleArn=principal.role_arn,
                RoleSessionName=principal.session_name,
                DurationSeconds=ROLE_SECONDS,
                Tags=[{"Key": key, "Value": value} for key, value in principal.session_tags.items()],
            )["Credentials"]
        return RoleKeys(
            access_key_id=made["AccessKeyId"],
            secret_access_key=made["SecretAccessKey"],
            session_token=made["SessionToken"],
            expires_at=made["Expiration"].timestamp(),
        )

    def objects(self, principal: JobPrincipal) -> S3ObjectStore:
        return s3_store(self._environment, lambda: self.assume_role(principal))
