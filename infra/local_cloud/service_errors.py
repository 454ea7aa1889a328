"""Builds the error answers to throttled calls and invalid signatures, in each AWS service's words and format. Pure.

Source: the services' API references (common errors) and the protocols in botocore's models.
"""

from __future__ import annotations

import re
from typing import Final
from xml.sax.saxutils import escape

import msgspec

from infra.local_cloud.signatures import Denial

_SCOPE: Final = re.compile(r"Credential=[^/]+/\d{8}/[^/]+/([a-z0-9-]+)/aws4_request")
_QUERY: Final = (
    "<ErrorResponse "
    'xmlns="http://{service}.amazonaws.com/doc/"><Error><Type>Sender</Type><Code>{code}</Code>'
    "<Message>{message}</Message></Error><RequestId>{request_id}</RequestId></ErrorResponse>"
)
_EC2: Final = (
    "<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
    "<RequestID>{request_id}</RequestID></Response>"
)
_S3: Final = "<Error><Code>{code}</Code><Message>{message}</Message><RequestId>{request_id}</RequestId></Error>"
_FORMS: Final = {"ec2": _EC2, "s3": _S3}
_QUERY_SERVICES: Final = frozenset(
    {"autoscaling", "cloudformation", "elasticloadbalancing", "iam", "monitoring", "sns", "sts"}
)
"""Services that answer in XML, like EC2 and S3. All others answer in JSON."""

THROTTLED: Final = {
    "autoscaling": ("400 Bad Request", "Throttling", "Rate exceeded"),
    "ec2": ("503 Service Unavailable", "RequestLimitExceeded", "Request limit exceeded."),
    "s3": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "events": ("400 Bad Request", "ThrottlingException", "Rate exceeded"),
    "sqs": ("400 Bad Request", "RequestThrottled", "Request is throttled."),
}
"""Status line, error code and message of a throttled call."""
_DENIED_OF_EC2: Final = dict.fromkeys(Denial, "AuthFailure") | {Denial.EXPIRED: "RequestExpired"}
_DENIED_OF_S3: Final = {
    Denial.MISSING: "AccessDenied",
    Denial.UNKNOWN_KEY: "InvalidAccessKeyId",
    Denial.MISMATCH: "SignatureDoesNotMatch",
    Denial.EXPIRED: "AccessDenied",
}
_DENIED_IN_XML: Final = {
    Denial.MISSING: "MissingAuthenticationToken",
    Denial.UNKNOWN_KEY: "InvalidClientTokenId",
    Denial.MISMATCH: "SignatureDoesNotMatch",
    Denial.EXPIRED: "ExpiredToken",
}
_DENIED_IN_JSON: Final = {
    Denial.MISSING: "MissingAuthenticationTokenException",
    Denial.UNKNOWN_KEY: "UnrecognizedClientException",
    Denial.MISMATCH: "InvalidSignatureException",
    Denial.EXPIRED: "ExpiredTokenException",
}

Answer = tuple[str, list[tuple[str, str]], bytes]
"""Status line, headers, body."""


def service_of(authorization: str) -> str:
    """Return the service in an Authorization header's credential scope; empty if none."""
    found = _SCOPE.search(authorization)
    return found[1] if found else ""


def throttled(service: str, request_id: str) -> Answer:
    """Return the answer to a throttled call of a service in `Conditions.throttle`."""
    status, code, message = THROTTLED[service]
    return answer_of(service, status, code, message, request_id)


def denied(service: str, denial: Denial, message: str, request_id: str) -> Answer:
    """Return a service's answer to a request with an invalid signature. Empty `service`: in S3's format."""
    service = service or "s3"
    others = _DENIED_IN_XML if service in _QUERY_SERVICES else _DENIED_IN_JSON
    codes = {"ec2": _DENIED_OF_EC2, "s3": _DENIED_OF_S3}.get(service, others)
    return answer_of(service, "403 Forbidden", codes[denial], message, request_id)


def answer_of(service: str, status: str, code: str, message: str, request_id: str) -> Answer:
    """Return an error in a service's format.

    `status` is for example `403 Forbidden`, `code` for example `Throttling`. `message` is escaped if the format is XML.
    """
    headers = [("x-amzn-RequestId", request_id)]
    if service not in _FORMS and service not in _QUERY_SERVICES:
        headers += [("Content-Type", "application/x-amz-json-1.1"), ("x-amzn-query-error", f"{code};Sender")]
        return status, headers, msgspec.json.encode({"__type": code, "message": message})
    body = _FORMS.get(service, _QUERY).format(
        service=service, code=code, message=escape(message), request_id=request_id
    )
    return status, [*headers, ("Content-Type", "text/xml")], f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()
