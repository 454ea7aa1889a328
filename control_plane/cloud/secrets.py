"""Stores the server's secrets in AWS Secrets Manager. Terraform creates them without a value.

The first server stores a value, under a version id that it derives from the secret's name. Secrets Manager rejects a
second value with that id, so servers that start at the same time use the same value.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from control_plane.cloud.connection import Connection, translated
from control_plane.cloud.errors import InvalidRequest, NotFound


class ManagedSecrets:
    """Implements `control_plane.secrets.Secrets`. Thread-safe.

    `prefix` begins the secrets' names, for example `everstep/`.
    """

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._client = connection.client("secretsmanager")
        self._prefix = prefix

    def kept(self, name: str, fresh: Callable[[], str]) -> str:
        """Return the value of a secret, and store the result of `fresh` first if it has none.

        Secrets Manager has the name with hyphens, after the prefix. Raises CloudError if the secret does not exist, the
        server may not read it, or AWS does not answer.
        """
        try:
            return self._value(name)
        except NotFound:
            self._put_first(name, fresh())
            return self._value(name)

    def _value(self, name: str) -> str:
        with translated():
            return str(self._client.get_secret_value(SecretId=self._id(name))["SecretString"])

    def _put_first(self, name: str, value: str) -> None:
        version = str(uuid.uuid5(uuid.NAMESPACE_URL, f"everstep:{self._id(name)}"))
        try:
            with translated():
                self._client.put_secret_value(SecretId=self._id(name), SecretString=value, ClientRequestToken=version)
        except InvalidRequest as error:
            if error.code != "ResourceExistsException":  # This code means that another server stored the value first.
                raise

    def _id(self, name: str) -> str:
        return self._prefix + name.replace("_", "-")
