"""What makes plain boto3 and the AWS CLI speak to an Everstep service: its model, where botocore looks, with the endpoint and the token in it.

botocore itself sends a bearer token over https only, and finds one in the environment or in a login of IAM Identity
Center; a local cluster has neither. But its endpoint rules may name headers. So the installed rules hold the endpoints
that are configured and the header that goes to each:

    no endpoint given                      the default profile's, with its token
    that of a profile given                that profile's token
    any other                              refused: there is no token for it

Invariant: a token goes to the endpoint that it was configured for and nowhere else, over https or to this machine; the
file that holds it is readable by its owner alone from the first moment on.
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
"""Where the generated model is; of the form of `AWS_DATA_PATH`."""
SERVICE: Final = "everstep"
RULES: Final = "endpoint-rule-set-1.json"


def default_directory(home: Path) -> Path:
    """Return the directory that every botocore looks into."""
    return home / ".aws" / "models"


def install(directory: Path, default: ClientConfig | None, *others: ClientConfig) -> list[Path]:
    """Write the model of the service for the endpoints that are configured; what is there already is replaced.

    Args:
        directory: `~/.aws/models`, or one that `AWS_DATA_PATH` names.
        default: the endpoint that counts where none is named, and its token; None: there is no such.
        *others: endpoints that have to be named, and their tokens.

    Returns:
        The files written.

    Raises:
        ConfigurationError: a token would cross a network in the clear.
    """
    rules = _rules(json.loads(next((DATA / SERVICE).glob(f"*/{RULES}")).read_text()), default, others)
    written = []
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
    """Return the model without operations that answer with events without an end: the AWS CLI would list them and cannot print them."""
    shapes = model["shapes"]

    def is_stream(operation: Json) -> bool:
        output = shapes[operation["output"]["shape"]] if "output" in operation else {"members": {}}
        return any(shapes[member["shape"]].get("eventstream") for member in output["members"].values())

    return {
        **model,
        "operations": {name: operation for name, operation in model["operations"].items() if not is_stream(operation)},
    }


def _without_signing(model: Json) -> Json:
    """Return the model of a service whose requests nobody signs: the token comes with the endpoint, and AWS keys must not."""
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
        if len(tokens[url]) > 1:  # an endpoint is all that tells profiles apart here: nobody acts with another's token
            answer = {
                "error": f"Profiles with different tokens have the endpoint {url}: give one another name of the server",
                "type": "error",
            }
        ours += [
            {"conditions": [is_given, {"fn": "stringEquals", "argv": [{"ref": "Endpoint"}, same]}], **answer}
            for same in (url, f"{url}/")
        ]
    known = ", ".join(checked_endpoint(configuration.endpoint_url) for configuration in configured)
    refusal = {
        "conditions": [],
        "error": f"No token is configured for this endpoint, only for {known}: everstep configure",
        "type": "error",
    }
    return {**rules, "rules": [*ours, refusal]}


def _endpoint(configuration: ClientConfig) -> Json:
    headers = {"Authorization": [f"Bearer {configuration.token}"]}
    return {"url": checked_endpoint(configuration.endpoint_url), "properties": {}, "headers": headers}
