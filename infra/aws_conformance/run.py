"""Executes one conformance run: creates resources, answers each question by an experiment, removes the resources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from everstep.protocol.codec import resolve
from infra.aws_conformance.account import Account, Place, Unanswered, clean
from infra.aws_conformance.questions import Answer, Question
from infra.local_cloud.aws_answers import AwsAnswers, RecordedAnswers

# Resolve `AwsAnswers` in the main thread, because the first use of a msgspec class is not thread-safe.
resolve(AwsAnswers)


def ask(
    account: Account,
    place: Place,
    questions: Sequence[Question],
    *,
    region: str,
    now: datetime,
    report: Callable[[str], None],
) -> RecordedAnswers:
    """Return the answers of an account. Removes the created resources also after a failed or interrupted experiment.

    `report` receives each question, answer and deleted resource as one line of text. A question without an answer
    leaves its fields at their defaults.
    """
    answers: dict[str, Answer] = {}
    unanswered: dict[str, str] = {}
    try:
        account.create(place)
        for question in questions:
            report(question.sentence)
            try:
                answers[question.name] = question.ask(account)
                report(f"  {_in_words(answers[question.name])}")
            except (Unanswered, ClientError, BotoCoreError, ResponseParserError) as error:
                unanswered[question.name] = str(error)
                report(f"  no answer: {error}")
    finally:
        for sentence in clean(account.client, account.pause):
            report(sentence)
    return RecordedAnswers(
        asked_at=now.isoformat(),
        region=region,
        instance_type=place.instance_type,
        answers=msgspec.convert(merged(list(answers.values())), AwsAnswers),
        observed={name: dict(answer.observed) for name, answer in answers.items()},
        unanswered=unanswered,
    )


def merged(answers: Sequence[Answer]) -> dict[str, Any]:
    """Combine the fields of all answers. Of durations with the same name, the longer one counts."""
    fields: dict[str, Any] = {}
    for answer in answers:
        for name, value in answer.fields.items():
            is_longest = name.endswith("_seconds") and name in fields
            fields[name] = max(fields[name], value) if is_longest else value
    return fields


def _in_words(answer: Answer) -> str:
    fields = ", ".join(f"{name} = {value}" for name, value in answer.fields.items())
    return fields or msgspec.json.encode(answer.observed).decode()
