"""How the client behaves when the service does not: retries, errors, waiting. What it says and hears is tested against the real API."""

from __future__ import annotations

import httpx
import pytest

from everstep.client import UNANSWERED_SECONDS, EverstepClient, Waiter
from everstep.config import ClientConfig
from everstep.errors import ConfigurationError, Conflict, ServiceFault, ServiceUnavailable, Throttled, Unauthorized, ValidationError, WaitFailed


class Service:
    """Answers requests from a list; an exception in it is raised."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def client(self) -> EverstepClient:
        http = httpx.Client(base_url="http://127.0.0.1", transport=httpx.MockTransport(self))
        return EverstepClient(ClientConfig("http://127.0.0.1", "hush"), http=http, pause=self.pauses.append)


def refusal(status: int, code: str = "X", **more) -> httpx.Response:
    return httpx.Response(status, json={"Code": code, "Message": "No.", "RequestId": "r-1", "Hint": "Try.", "Fields": [], **more})


GONE = httpx.ConnectError("refused")


def test_reading_is_tried_again():
    service = Service(GONE, refusal(503), refusal(429), {"Fleets": []})
    assert service.client().list_fleets() == {"Fleets": []}
    assert len(service.requests) == 4
    assert service.pauses == sorted(service.pauses)
    assert len(set(service.pauses)) == 3


def test_reading_is_not_tried_for_ever():
    service = Service(GONE)
    with pytest.raises(ServiceUnavailable, match="does not answer") as failed:
        service.client().list_fleets()
    assert len(service.requests) == 4
    assert failed.value.hint


def test_creating_is_sent_once():
    service = Service(GONE, {})
    with pytest.raises(ServiceUnavailable):
        service.client().create_training_job(TrainingJobName="gpt")
    assert len(service.requests) == 1


def test_a_refusal_is_not_tried_again():
    service = Service(refusal(409, "ResourceInUse"), {})
    with pytest.raises(Conflict) as failed:
        service.client().list_fleets()
    assert (failed.value.code, failed.value.message, failed.value.hint, failed.value.request_id) == ("ResourceInUse", "No.", "Try.", "r-1")
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(400), ValidationError),
        (refusal(401), Unauthorized),
        (refusal(429), Throttled),
        (refusal(500), ServiceFault),
        (httpx.Response(502, text="<html>"), ServiceUnavailable),
        (httpx.Response(404, json=[]), Exception),
        (httpx.Response(200, text="<html>"), ServiceFault),
        (httpx.Response(302, headers={"location": "http://evil.example"}), ServiceFault),
        (httpx.ReadTimeout("slow"), ServiceUnavailable),
    ],
)
def test_every_answer_is_an_answer_or_a_typed_error(answer, kind):
    with pytest.raises(kind):
        Service(answer).client().list_fleets()


def test_the_token_travels_and_names_are_escaped():
    service = Service({})
    service.client().describe_training_job(TrainingJobName="../fleets?x=1#")
    assert service.requests[0].headers["authorization"] == "Bearer hush"
    assert service.requests[0].url.raw_path == b"/v1/training-jobs/..%2Ffleets%3Fx%3D1%23"


def test_queries_leave_out_what_is_none():
    service = Service({"Nodes": []})
    service.client().list_nodes(FleetName=None, IncludeEnded=True)
    assert dict(service.requests[0].url.params) == {"IncludeEnded": "true"}


def test_a_source_comes_one_way_or_the_other():
    for arguments in ({}, {"Directory": ".", "Body": b""}):
        with pytest.raises(ConfigurationError):
            Service({}).client().upload_source(**arguments)


# Waiting


def job(status: str, reason: str = "because") -> dict:
    return {"TrainingJobStatus": status, "Reason": reason}


def test_a_waiter_looks_until_the_job_has_ended():
    service = Service(job("InProgress"), job("InProgress"), job("Completed"))
    seen: list[str] = []
    waiter = service.client().get_waiter("training_job_completed")
    waiter.wait(TrainingJobName="gpt", WaiterConfig={"Delay": 2}, on_progress=lambda seen_job: seen.append(seen_job["TrainingJobStatus"]))
    assert seen == ["InProgress", "InProgress", "Completed"]
    assert service.pauses == [2, 2]


def test_another_end_than_hoped_for_is_an_error_with_the_reason():
    with pytest.raises(WaitFailed, match="'gpt' is Failed: boom"):
        Service(job("Failed", "boom")).client().get_waiter("training_job_completed").wait(TrainingJobName="gpt")
    assert Service(job("Failed")).client().get_waiter("training_job_ended").wait(TrainingJobName="gpt") == job("Failed")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def test_a_waiter_gives_up_in_time():
    clock = Clock()
    with pytest.raises(WaitFailed, match="within 5 s"):
        Waiter(Service(job("InProgress")).client(), "training_job_ended", clock.pause, clock).wait(
            TrainingJobName="gpt", WaiterConfig={"TimeoutSeconds": 5}
        )
    assert clock.now == 5


def test_a_waiter_sits_out_a_restart_of_the_control_plane():
    clock = Clock()
    service = Service(*[GONE] * 20, job("Completed"))
    assert Waiter(service.client(), "training_job_ended", clock.pause, clock).wait(TrainingJobName="gpt") == job("Completed")


def test_a_waiter_does_not_wait_for_a_control_plane_for_ever():
    clock = Clock()
    with pytest.raises(ServiceUnavailable):
        Waiter(Service(GONE).client(), "training_job_ended", clock.pause, clock).wait(TrainingJobName="gpt")
    assert clock.now == UNANSWERED_SECONDS


def test_there_are_only_some_waiters():
    with pytest.raises(ConfigurationError, match="no waiter named 'never'"):
        Service({}).client().get_waiter("never")
