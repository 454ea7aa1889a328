"""Translates botocore's errors into `everstep.errors`, for programs that show errors to people.

The command line uses this module. Programs that use the SDK can handle botocore's errors directly.

Invariant: every error of botocore or of `everstep.validation` becomes an `everstep.errors.EverstepError`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, WaiterError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from everstep.errors import FieldError, ServiceFailed, WaitFailed, WaitTimedOut
from everstep.validation import ValidationError

UNAVAILABLE = "ServiceUnavailableException"
WRONG_ADDRESS = "Is this the address of an Everstep control plane?"
_UNAVAILABLE_STATUSES = (502, 503, 504)


@contextmanager
def translated() -> Generator[None]:
    """Convert errors of botocore inside the block into errors of `everstep.errors`.

    A `ServiceFailed` has the service's message, code and request id, if the service sent them.

    Raises:
        ServiceFailed: the service returned an error or did not respond.
        WaitFailed: the state that a waiter awaits cannot be reached any more.
        WaitTimedOut: the awaited state was not reached in time.
    """
    try:
        yield
    except ClientError as error:
        raise _from_answer(error) from error
    except ValidationError as error:
        raise ServiceFailed(str(error), code="ValidationException", fields=error.fields) from error
    except WaiterError as error:
        raise _from_waiter(error) from error
    except (HTTPClientError, NoConnection) as error:
        raise ServiceFailed(
            f"The service does not respond: {error}",
            hint="Check that the control plane runs: `everstep local status`, or ask its operator.",
            code=UNAVAILABLE,
        ) from error
    except (BotoCoreError, ResponseParserError) as error:
        raise ServiceFailed(f"The request failed: {error}", hint=WRONG_ADDRESS) from error


def _from_waiter(error: WaiterError) -> ServiceFailed | WaitFailed | WaitTimedOut:
    last = cast(Any, error.last_response or {})  # botocore's type lacks the fields that the service adds.
    if "Error" in last:
        return _from_answer(ClientError(last, error.kwargs["name"]))
    reason = f" {last['Reason']}" if last.get("Reason") else ""
    status = next((f" It is {last[name]}." for name in ("SecondaryStatus", "FleetStatus") if name in last), "")
    if "Max attempts exceeded" in str(error):
        return WaitTimedOut(f"The condition was not met before the wait timed out.{status}{reason}")
    return WaitFailed(f"The condition can no longer be met.{status}{reason}")


def _from_answer(error: ClientError) -> ServiceFailed:
    answer = cast(Any, error.response)  # botocore's type lacks the fields that the service adds, such as `Hint`.
    details, metadata = answer.get("Error", {}), answer.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    # Every error code of the service ends with "Exception". An answer without such a code is not from the service but,
    # for example, from a proxy.
    if not str(details.get("Code", "")).endswith("Exception"):
        code = UNAVAILABLE if status in _UNAVAILABLE_STATUSES else ""
        return ServiceFailed(f"HTTP {status} without an error message from the service.", hint=WRONG_ADDRESS, code=code)
    return ServiceFailed(
        str(details.get("Message", "")),
        hint=str(answer.get("Hint", "")),
        code=str(details["Code"]),
        request_id=str(metadata.get("RequestId", "")),
        fields=[FieldError(field["Field"], field["Message"]) for field in answer.get("Fields", [])],
    )
