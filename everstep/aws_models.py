"""Installs the service's model, so that plain boto3 and the AWS CLI can call an Everstep service.

botocore sends bearer tokens over https only, but a local cluster uses http. botocore's endpoint rules, a part of the
service model, may add headers to each request. The installed rules therefore list the configured endpoints, each with
an Authorization header:

    no endpoint given                      use the endpoint and the token of the default profile
    the endpoint of a profile given        send the token of this profile
    any other endpoint given               raise an error, because no token is configured for it

Invariant: a token is sent only to the endpoint that it was configured for, over https or to this machine. Files that
contain a token are created readable by their owner only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from everstep.config import ClientConfig, checked_endpoint

Json = dict[str, Any]

DATA: Final = Path(__file__).with_name("data")
"""Directory of the generated model, in the layout of `AWS_DATA_PATH`."""
SERVICE: Final = "everstep"
RULES: Final = "endpoint-rule-set-1.json"


def default_directory(home: Path) -> Path:
    """Return the directory in which botocore searches for models by default."""
    return home / ".aws" / "models"


def install(directory: Path, default: ClientConfig | None, *others: ClientConfig) -> list[Path]:
    """Write the model of the service for the configured endpoints. Existing files are replaced.

    Args:
        directory: `~/.aws/models`, or a directory of `AWS_DATA_PATH`.
        default: endpoint and token for calls without an explicit endpoint. None: such calls fail.
        *others: further endpoints with their tokens. A call must select one of them explicitly.

    Returns:
        The written files.

    Raises:
        ConfigurationError: a token would cross a network unencrypted.
    """
    rules = _rules(json.loads(next((DATA / SERVICE).glob(f"*/{RULES}")).read_text()), default, others)
    written: list[Path] = []
    for source in sorted((DATA / SERVICE).glob("*/*.json")):
        document: Json = json.loads(source.read_text())
        if source.name == "service-2.json":
            document = _without_signing(_without_streams(document))
        elif source.name == RULES:
            document = rules
        target = directory / source.relative_to(DATA)
        for parent in (directory, *reversed(target.relative_to(directory).parents[:-1])):
            (directory / parent).mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(document, file)
        draft.replace(target)
        written.append(target)
    return written


def _without_streams(model: Json) -> Json:
    """Return the model without operations that answer with an endless event stream.

    The AWS CLI would list these operations but cannot print their output.
    """
    shapes = model["shapes"]

    def is_stream(operation: Json) -> bool:
        output: Json = shapes[operation["output"]["shape"]] if "output" in operation else {"members": {}}
        return any(shapes[member["shape"]].get("eventstream") for member in output["members"].values())

    return {
        **model,
        "operations": {name: operation for name, operation in model["operations"].items() if not is_stream(operation)},
    }


def _without_signing(model: Json) -> Json:
    """Return the model with signing disabled for every operation.

    The endpoint rules (`_rules`) add Everstep's token to each request. AWS credentials must not be sent to Everstep.
    """
    metadata = {
        **{name: value for name, value in model["metadata"].items() if name != "auth"},
        "signatureVersion": "v4",
    }
    unsigned = {name: {**operation, "auth": ["smithy.api#noAuth"]} for name, operation in model["operations"].items()}
    return {**model, "metadata": metadata, "operations": unsigned}


def _rules(rules: Json, default: ClientConfig | None, others: Sequence[ClientConfig]) -> Json:
    is_given: Json = {"fn": "isSet", "argv": [{"ref": "Endpoint"}]}
    configured = [configuration for configuration in (default, *others) if configuration is not None]
    ours = (
        []
        if default is None
        else [{"conditions": [{"fn": "not", "argv": [is_given]}], "endpoint": _endpoint(default), "type": "endpoint"}]
    )
    tokens: dict[str, set[str]] = {}
    for configuration in configured:
        tokens.setdefault(checked_endpoint(configuration.endpoint_url), set()).add(configuration.token)
    for configuration in configured:
        url = checked_endpoint(configuration.endpoint_url)
        answer: Json = {"endpoint": _endpoint(configuration), "type": "endpoint"}
        # botocore's endpoint rules, which this function builds, select a profile by its endpoint only. If profiles with
        # different tokens have the same endpoint, the rules return an error instead of a token of the wrong profile.
        if len(tokens[url]) > 1:
            answer = {
                "error": (
                    f"Profiles with different tokens use the endpoint {url}. Use another host name of the server "
                    "in all but one of them."
                ),
                "type": "error",
            }
        ours += [
            {"conditions": [is_given, {"fn": "stringEquals", "argv": [{"ref": "Endpoint"}, same]}], **answer}
            for same in (url, f"{url}/")
        ]
    known = ", ".join(checked_endpoint(configuration.endpoint_url) for configuration in configured)
    refusal: Json = {
        "conditions": [],
        "error": f"No token is configured for this endpoint. Tokens exist for {known}. Run everstep configure.",
        "type": "error",
    }
    return {**rules, "rules": [*ours, refusal]}


def _endpoint(configuration: ClientConfig) -> Json:
    headers = {"Authorization": [f"Bearer {configuration.token}"]}
    return {"url": checked_endpoint(configuration.endpoint_url), "properties": {}, "headers": headers}
