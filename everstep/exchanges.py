"""Logs the HTTP exchanges with Everstep's API, on the logger `everstep.http` at level DEBUG.

`everstep … --debug` shows the log. A program shows it by setting the logger to DEBUG.

    endpoint http://127.0.0.1:8443, everstep 0.1.0, botocore 1.42.0
    DescribeTrainingJob {"TrainingJobName": "gpt"}
    > GET http://127.0.0.1:8443/v1/training-jobs/gpt
    > Authorization: *****
    < 503 in attempt 1
    < x-amzn-requestid: 4bc8…
    < {"Error": {"Code": "ServiceUnavailableException", …}}
    > GET …                                                    again for every retry

Invariant: the log contains no token, and no value of a field that the contract marks as sensitive.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, cast

import botocore

from everstep.aws_models import SERVICE

log = logging.getLogger("everstep.http")

MASK: Final = "*****"
MAX_LOGGED_CHARACTERS: Final = 4_000
"""Maximum number of logged characters of a request or response body."""
_HIDDEN_HEADERS: Final = ("authorization", "proxy-authorization", "cookie", "set-cookie")


def watch(client: Any) -> None:
    """Log the requests and responses of a client, if the logger is at DEBUG.

    Args:
        client: a botocore client of Everstep's API.
    """

    def operation(event_name: str) -> Any:
        return client.meta.service_model.operation_model(event_name.rpartition(".")[2])

    def asked(params: Any, event_name: str, **_: Any) -> None:
        if log.isEnabledFor(logging.DEBUG):
            model = operation(event_name)
            log.debug("%s %s", model.name, _body_text(params, model.input_shape))

    def sent(request: Any, **_: Any) -> None:
        log_request(request.method, request.url, request.headers.items())

    def answered(
        event_name: str,
        response_dict: Mapping[str, Any] | None,
        parsed_response: Mapping[str, Any] | None,
        context: Mapping[str, Any],
        exception: Exception | None,
        **_: Any,
    ) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        attempt = f"attempt {context.get('retries', {}).get('attempt', 1)}"
        if response_dict is None or parsed_response is None:
            log.debug("< nothing in %s: %s", attempt, exception)
            return
        status = response_dict["status_code"]
        log_response(f"{status} in {attempt}", response_dict["headers"].items())
        shape = operation(event_name).output_shape if status < 300 else None
        log.debug(
            "< %s",
            _body_text({name: value for name, value in parsed_response.items() if name != "ResponseMetadata"}, shape),
        )

    log.debug(
        "endpoint %s, everstep %s, botocore %s", client.meta.endpoint_url, version("everstep"), botocore.__version__
    )
    client.meta.events.register(f"provide-client-params.{SERVICE}", asked)
    client.meta.events.register(f"before-send.{SERVICE}", sent)
    client.meta.events.register(f"response-received.{SERVICE}", answered)


def log_request(method: str, url: str, headers: Iterable[tuple[str, object]]) -> None:
    """Log the first line and the headers of a request."""
    log.debug("> %s %s", method, url)
    _tell_headers(">", headers)


def log_response(status: str, headers: Iterable[tuple[str, object]]) -> None:
    """Log the status and the headers of a response."""
    log.debug("< %s", status)
    _tell_headers("<", headers)


def _tell_headers(mark: str, headers: Iterable[tuple[str, object]]) -> None:
    if log.isEnabledFor(logging.DEBUG):
        for name, value in headers:
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            log.debug("%s %s: %s", mark, name, MASK if name.lower() in _HIDDEN_HEADERS else text)


def _body_text(value: Any, shape: Any) -> str:
    text = json.dumps(
        _masked(value, shape),
        default=lambda other: f"<{type(other).__name__}>" if not hasattr(other, "isoformat") else other.isoformat(),
    )
    return text if len(text) <= MAX_LOGGED_CHARACTERS else f"{text[:MAX_LOGGED_CHARACTERS]}… ({len(text)} characters)"


def _masked(value: Any, shape: Any) -> Any:
    """Return a copy of a value in which `MASK` replaces every field that the contract marks as sensitive.

    Values that the service model does not describe stay unchanged.
    """
    if shape is None:
        return value
    if shape.metadata.get("sensitive"):
        return MASK
    if shape.type_name == "structure" and isinstance(value, Mapping):
        return {name: _masked(each, shape.members.get(name)) for name, each in cast("Mapping[str, Any]", value).items()}
    if shape.type_name == "list" and isinstance(value, (list, tuple)):
        return [_masked(each, shape.member) for each in cast("Sequence[Any]", value)]
    if shape.type_name == "map" and isinstance(value, Mapping):
        return {name: _masked(each, shape.value) for name, each in cast("Mapping[str, Any]", value).items()}
    return f"<{len(value)} bytes>" if isinstance(value, (bytes, bytearray)) else value
