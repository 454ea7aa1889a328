"""AWS's refusal of a call that comes too often, in each service's own words and format. Pure.

Source: the services' API references (common errors) and the botocore models' protocols.
"""

from __future__ import annotations

import re
from typing import Final
from xml.sax.saxutils import escape

import msgspec

_SCOPE: Final = re.compile(r"Credential=[^/]+/\d{8}/[^/]+/([a-z0-9-]+)/aws4_request")
_QUERY: Final = '<ErrorResponse xmlns="http://{service}.amazonaws.com/doc/"><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error><RequestId>{request_id}</RequestId></ErrorResponse>'
_EC2: Final = (
    "<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors><RequestID>{request_id}</RequestID></Response>"
)
_S3: Final = "<Error><Code>{code}</Code><Message>{message}</Message><RequestId>{request_id}</RequestId></Error>"
_XML: Final = {
    "autoscaling": ("400 Bad Request", "Throttling", "Rate exceeded", _QUERY),
    "ec2": ("503 Service Unavailable", "RequestLimitExceeded", "Request limit exceeded.", _EC2),
    "s3": ("503 Slow Down", "SlowDown", "Please reduce your request rate.", _S3),
}
_JSON: Final = {
    "events": ("ThrottlingException", "Rate exceeded"),
    "sqs": ("RequestThrottled", "Request is throttled."),
}


def service_of(authorization: str) -> str:
    """Return the service that a signed request is for, from its credential scope; empty if it is not signed."""
    found = _SCOPE.search(authorization)
    return found[1] if found else ""


def refusal(service: str, request_id: str) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return the answer of a service that is asked too often.

    Args:
        service: one that `Conditions.throttle` may name.
        request_id: of this answer.

    Returns:
        (status line, headers, body).
    """
    headers = [("x-amzn-RequestId", request_id)]
    if service in _JSON:
        code, message = _JSON[service]
        headers += [("Content-Type", "application/x-amz-json-1.1"), ("x-amzn-query-error", f"{code};Sender")]
        return "400 Bad Request", headers, msgspec.json.encode({"__type": code, "message": message})
    status, code, message, form = _XML[service]
    body = form.format(service=service, code=code, message=escape(message), request_id=request_id)
    return status, [*headers, ("Content-Type", "text/xml")], f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()
