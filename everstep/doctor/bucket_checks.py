"""The checks of `everstep doctor --bucket`: versioning, lifecycle rules and encryption of the service's bucket.

Everstep deletes objects by plain requests, without version ids. In a bucket with versioning, such a request only adds a
delete marker, and the storage stays in use until a lifecycle rule removes the noncurrent version.

Invariant: `judge_bucket` is pure. `bucket_facts` changes nothing in AWS. If AWS rejects a request, `bucket_facts`
returns AWS's error message in `BucketFacts.errors` and raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from everstep.doctor.findings import Finding, Level

ARCHIVES: Final = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes whose objects no request can read before they are restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An enabled lifecycle rule of a bucket."""

    name: str
    covers_all: bool
    """Whether the rule applies to every object of the bucket."""
    aborts_uploads: bool = False
    expires_noncurrent: bool = False
    expires_current: bool = False
    archives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFacts:
    """The settings of a bucket. A setting that could not be read has an entry in `errors`."""

    name: str
    versioning: str = ""
    """`Enabled`, `Suspended`, or empty if the bucket never had versioning."""
    rules: tuple[Rule, ...] = ()
    kms_key: str = ""
    """Key that encrypts new objects by default. Empty if S3's own keys encrypt them."""
    has_bucket_key: bool = False
    """Whether S3 uses one data key for many objects, which saves most requests to KMS."""
    errors: Mapping[str, str] | None = None
    """AWS's error message for each setting that could not be read: `versioning`, `lifecycle` or `encryption`."""


def bucket_facts(s3: Any, name: str) -> BucketFacts:
    """Return the settings of a bucket.

    Args:
        s3: a boto3 client of S3 in the bucket's region.
        name: name of the bucket, without `s3://`.

    Returns:
        The settings that the caller may read, and AWS's error message for each setting that the caller may not read.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    errors = dict[str, str]()

    def read(setting: str, call: Callable[..., Any], missing: str = "") -> Mapping[str, Any]:
        try:
            answer: Mapping[str, Any] = call(Bucket=name)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != missing:
                errors[setting] = str(error)
            return {}
        except (BotoCoreError, ResponseParserError) as error:
            errors[setting] = str(error)
            return {}
        return answer

    versioning = read("versioning", s3.get_bucket_versioning)
    lifecycle = read("lifecycle", s3.get_bucket_lifecycle_configuration, "NoSuchLifecycleConfiguration")
    encryption = read("encryption", s3.get_bucket_encryption, "ServerSideEncryptionConfigurationNotFoundError")
    settings: Any = encryption.get("ServerSideEncryptionConfiguration") or {}
    defaults: Any = settings.get("Rules") or [{}]
    default: Any = defaults[0].get("ApplyServerSideEncryptionByDefault") or {}
    is_kms = str(default.get("SSEAlgorithm", "")).startswith("aws:kms")
    return BucketFacts(
        name=name,
        versioning=versioning.get("Status", ""),
        rules=tuple(_rule(rule) for rule in lifecycle.get("Rules", ()) if rule.get("Status") == "Enabled"),
        kms_key=default.get("KMSMasterKeyID") or "aws/s3" if is_kms else "",
        has_bucket_key=bool(defaults[0].get("BucketKeyEnabled")),
        errors=errors,
    )


def _rule(rule: Mapping[str, Any]) -> Rule:
    scope = {**rule.get("Filter", {}), "Prefix": rule.get("Prefix") or rule.get("Filter", {}).get("Prefix")}
    expiration = rule.get("Expiration", {})
    return Rule(
        name=rule.get("ID", "without an id"),
        covers_all=not any(scope.values()),
        aborts_uploads="AbortIncompleteMultipartUpload" in rule,
        expires_noncurrent="NoncurrentVersionExpiration" in rule,
        expires_current="Days" in expiration or "Date" in expiration,
        archives=any(each.get("StorageClass") in ARCHIVES for each in rule.get("Transitions", ())),
    )


def judge_bucket(facts: BucketFacts) -> Iterator[Finding]:
    """Yield the findings about a bucket: first about unreadable settings, then about its rules and encryption."""
    unread = facts.errors or {}
    for setting, words in unread.items():
        yield Finding(
            "bucket",
            Level.WARNING,
            f"the {setting} of the bucket {facts.name} is unknown: {words}",
            "Allow s3:GetBucketVersioning, s3:GetLifecycleConfiguration and s3:GetEncryptionConfiguration for this "
            "check.",
        )
    whole = [rule for rule in facts.rules if rule.covers_all]
    if "lifecycle" not in unread:
        yield from _uploads(facts.name, whole)
        yield from _rules_by_age(facts)
        if "versioning" not in unread:
            yield from _versions(facts, whole)
    if "encryption" not in unread:
        yield from _encryption(facts)


def _uploads(name: str, whole: list[Rule]) -> Iterator[Finding]:
    if any(rule.aborts_uploads for rule in whole):
        yield Finding("bucket", Level.OK, f"a rule removes unfinished uploads from {name}")
    else:
        yield Finding(
            "bucket",
            Level.WARNING,
            f"no rule for the whole bucket {name} removes unfinished uploads: parts of killed agents stay for ever",
            "Add a lifecycle rule with AbortIncompleteMultipartUpload, DaysAfterInitiation 1.",
        )


def _rules_by_age(facts: BucketFacts) -> Iterator[Finding]:
    for rule in facts.rules:
        if not rule.expires_current and not rule.archives:
            continue
        what = "deletes objects" if rule.expires_current else "moves objects to an archive that cannot be read at once"
        yield Finding(
            "bucket",
            Level.WRONG if rule.covers_all else Level.WARNING,
            f"the lifecycle rule {rule.name} of {facts.name} {what} by their age, checkpoints of paused jobs included",
            "Remove the rule, or limit it to a prefix that Everstep does not use. MaxCount and MaxAgeInSeconds of a "
            "job limit its checkpoints.",
        )


def _versions(facts: BucketFacts, whole: list[Rule]) -> Iterator[Finding]:
    if not facts.versioning:
        yield Finding("bucket", Level.OK, f"{facts.name} has no versioning, so deletions free storage at once")
    elif any(rule.expires_noncurrent for rule in whole):
        yield Finding("bucket", Level.OK, f"a rule removes noncurrent versions from {facts.name}")
    else:
        yield Finding(
            "bucket",
            Level.WARNING,
            f"{facts.name} has versioning ({facts.versioning}) and no rule that removes noncurrent versions: every "
            "deleted checkpoint stays and costs money",
            "Add a lifecycle rule for the whole bucket with NoncurrentVersionExpiration, NoncurrentDays 1, and "
            "Expiration with ExpiredObjectDeleteMarker.",
        )


def _encryption(facts: BucketFacts) -> Iterator[Finding]:
    if not facts.kms_key:
        yield Finding("bucket", Level.OK, f"S3's own keys encrypt {facts.name}")
        return
    words = f"the KMS key {facts.kms_key} encrypts {facts.name}"
    needed = "The roles of the server and of the nodes need kms:GenerateDataKey and kms:Decrypt for this key."
    if facts.has_bucket_key:
        yield Finding("bucket", Level.OK, words, needed)
    else:
        yield Finding(
            "bucket",
            Level.WARNING,
            f"{words} without an S3 Bucket Key: each object costs requests to KMS, which KMS can throttle",
            f"Enable the S3 Bucket Key. {needed}",
        )
