"""What botocore raises, as one error that a person can be told: the command line and other programs of ours stand on this, SDK users need not.

Invariant: whatever a call of the client raises on purpose ends as an `everstep.errors.EverstepError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, WaiterError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from everstep.errors import EverstepError, FieldError, ServiceFailed, WaitFailed, WaitTimedOut
from everstep.validation import ValidationError

UNAVAILABLE = "ServiceUnavailableException"
WRONG_ADDRESS = "Is this the address of an Everstep control plane?"
_UNAVAILABLE_STATUSES = (502, 503, 504)


@contextmanager
def translated() -> Iterator[None]:
    """Turn what botocore raises inside the block into one of `everstep.errors`.

    Raises:
        ServiceFailed: with the service's message, code and request id, where it has said any.
        WaitFailed: what a waiter waits for cannot come any more.
        WaitTimedOut: it has not come in time.
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
            f"The service does not answer: {error}",
            hint="Does the control plane run? `everstep local status`, or ask who runs it.",
            code=UNAVAILABLE,
        ) from error
    except (BotoCoreError, ResponseParserError) as error:
        raise ServiceFailed(f"The request failed: {error}", hint=WRONG_ADDRESS) from error


def _from_waiter(error: WaiterError) -> EverstepError:
    last = error.last_response or {}
    if "Error" in last:
        return _from_answer(ClientError(last, error.kwargs["name"]))
    told = f" {last['Reason']}" if last.get("Reason") else ""
    status = next((f" It is {last[name]}." for name in ("SecondaryStatus", "FleetStatus") if name in last), "")
    if "Max attempts exceeded" in str(error):
        return WaitTimedOut(f"What was waited for has not come in time.{status}{told}")
    return WaitFailed(f"What was waited for cannot come any more.{status}{told}")


def _from_answer(error: ClientError) -> ServiceFailed:
    answer = error.response
    said, metadata = answer.get("Error", {}), answer.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    if not str(said.get("Code", "")).endswith("Exception"):  # nothing of ours: a proxy, or another service
        code = UNAVAILABLE if status in _UNAVAILABLE_STATUSES else ""
        return ServiceFailed(f"HTTP {status}, without a word of the service.", hint=WRONG_ADDRESS, code=code)
    return ServiceFailed(
        str(said.get("Message", "")),
        hint=str(answer.get("Hint", "")),
        code=str(said["Code"]),
        request_id=str(metadata.get("RequestId", "")),
        fields=[FieldError(field["Field"], field["Message"]) for field in answer.get("Fields", [])],
    )
