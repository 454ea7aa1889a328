"""Tests `everstep doctor --bucket`: the findings about a bucket that follow from S3's answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from everstep.doctor.bucket_checks import BucketFacts, Rule, bucket_facts, judge_bucket
from everstep.doctor.findings import Level

ABORT = Rule(name="abort", covers_all=True, aborts_uploads=True)
NONCURRENT = Rule(name="old", covers_all=True, expires_noncurrent=True)
GOOD = BucketFacts(name="b", rules=(ABORT,))


def worst(facts: BucketFacts) -> list[tuple[Level, str]]:
    """Return the level and the text of all findings that are not OK."""
    return [(each.level, each.message) for each in judge_bucket(facts) if each.level is not Level.OK]


@pytest.mark.parametrize(
    "facts",
    [
        GOOD,
        BucketFacts(name="b", rules=(ABORT, NONCURRENT), versioning="Enabled"),
        BucketFacts(name="b", rules=(ABORT,), kms_key="arn:key", has_bucket_key=True),
    ],
)
def test_a_bucket_that_fits_has_no_complaint(facts: BucketFacts) -> None:
    assert worst(facts) == []


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (BucketFacts(name="b"), Level.WARNING, "removes unfinished uploads"),
        (
            BucketFacts(name="b", rules=(Rule(name="x", covers_all=False, aborts_uploads=True),)),
            Level.WARNING,
            "no rule for the whole bucket",
        ),
        (BucketFacts(name="b", rules=(ABORT,), versioning="Enabled"), Level.WARNING, "noncurrent versions"),
        (BucketFacts(name="b", rules=(ABORT,), versioning="Suspended"), Level.WARNING, "(Suspended)"),
        (
            BucketFacts(
                name="b",
                versioning="Enabled",
                rules=(ABORT, Rule(name="x", covers_all=False, expires_noncurrent=True)),
            ),
            Level.WARNING,
            "noncurrent versions",
        ),
        (
            BucketFacts(name="b", rules=(ABORT, Rule(name="month", covers_all=True, expires_current=True))),
            Level.WRONG,
            "the lifecycle rule month of b deletes objects",
        ),
        (
            BucketFacts(name="b", rules=(ABORT, Rule(name="month", covers_all=False, expires_current=True))),
            Level.WARNING,
            "the lifecycle rule month of b deletes objects",
        ),
        (
            BucketFacts(name="b", rules=(ABORT, Rule(name="cold", covers_all=True, archives=True))),
            Level.WRONG,
            "moves objects to an archive",
        ),
        (BucketFacts(name="b", rules=(ABORT,), kms_key="arn:key"), Level.WARNING, "without an S3 Bucket Key"),
        (BucketFacts(name="b", errors={"lifecycle": "Access Denied"}), Level.WARNING, "unknown: Access Denied"),
    ],
)
def test_each_setting_that_costs_data_or_money_is_one_finding(facts: BucketFacts, level: Level, words: str) -> None:
    ((found_level, message),) = worst(facts)
    assert found_level is level
    assert words in message


def test_the_roles_that_use_a_kms_key_are_named() -> None:
    findings = list(judge_bucket(BucketFacts(name="b", rules=(ABORT,), kms_key="arn:key", has_bucket_key=True)))
    assert any("kms:GenerateDataKey and kms:Decrypt" in finding.advice for finding in findings)


def answering(**answers: Mapping[str, Any] | str) -> Any:
    """Return an S3 client with an answer, or an error code, per operation."""

    def call(operation: str) -> Any:
        def answer(Bucket: str) -> Mapping[str, Any]:
            assert Bucket == "b"
            found = answers[operation]
            if isinstance(found, str):
                raise ClientError({"Error": {"Code": found, "Message": found}}, operation)
            return found

        return answer

    return SimpleNamespace(
        get_bucket_versioning=call("versioning"),
        get_bucket_lifecycle_configuration=call("lifecycle"),
        get_bucket_encryption=call("encryption"),
    )


def test_a_bucket_without_any_setting_is_no_error() -> None:
    s3 = answering(
        versioning={},
        lifecycle="NoSuchLifecycleConfiguration",
        encryption="ServerSideEncryptionConfigurationNotFoundError",
    )
    assert bucket_facts(s3, "b") == BucketFacts(name="b", errors={})


def test_the_versioning_of_a_bucket_is_read() -> None:
    s3 = answering(versioning={"Status": "Suspended"}, lifecycle={}, encryption={})
    assert bucket_facts(s3, "b").versioning == "Suspended"


def test_s3_s_answers_become_facts_and_refusals_become_errors() -> None:
    rules = [
        {
            "ID": "all",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
            "Expiration": {"ExpiredObjectDeleteMarker": True},
        },
        {"ID": "off", "Status": "Disabled", "Filter": {}, "Expiration": {"Days": 1}},
        {"ID": "jobs", "Status": "Enabled", "Filter": {"Prefix": "jobs/"}, "Expiration": {"Days": 30}},
        {"ID": "tag", "Status": "Enabled", "Filter": {"Tag": {"Key": "a", "Value": "b"}}, "Transitions": [
            {"Days": 1, "StorageClass": "DEEP_ARCHIVE"}
        ]},
    ]  # fmt: skip
    default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "arn:key"}
    encryption = {"Rules": [{"ApplyServerSideEncryptionByDefault": default, "BucketKeyEnabled": True}]}
    s3 = answering(
        versioning="AccessDenied",
        lifecycle={"Rules": rules},
        encryption={"ServerSideEncryptionConfiguration": encryption},
    )
    facts = bucket_facts(s3, "b")
    assert facts.rules == (
        Rule(name="all", covers_all=True, aborts_uploads=True, expires_noncurrent=True),
        Rule(name="jobs", covers_all=False, expires_current=True),
        Rule(name="tag", covers_all=False, archives=True),
    )
    assert (facts.kms_key, facts.has_bucket_key, list(facts.errors or ())) == ("arn:key", True, ["versioning"])
