"""The options that `everstep server` and `everstep db` share: where the database and the cloud are."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from control_plane.cloud.connection import CloudMode, CloudSettings
from control_plane.cloud.region import find_region
from everstep.host.local_keys import LocalKeys


def of_the_database() -> argparse.ArgumentParser:
    """Return a parent parser with the options that name the database."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--state-dir",
        type=Path,
        default=Path(os.environ.get("EVERSTEP_STATE_DIR", ".everstep/server")),
        help="the server's directory for secrets and the embedded database (default %(default)s)",
    )
    options.add_argument(
        "--database-url",
        default=os.environ.get("EVERSTEP_DATABASE_URL", ""),
        help="SQLAlchemy URL of the database; default: SQLite in the state directory",
    )
    return options


def of_the_cloud() -> argparse.ArgumentParser:
    """Return a parent parser with the options that name the cloud."""
    options, env = argparse.ArgumentParser(add_help=False), os.environ.get
    options.add_argument(
        "--mode",
        choices=[mode.value for mode in CloudMode],
        default=env("EVERSTEP_MODE", "aws"),
        help="cloud that the server manages: aws or local (default %(default)s)",
    )
    options.add_argument(
        "--region",
        default=env("EVERSTEP_AWS_REGION", ""),
        help="AWS region (default: EVERSTEP_AWS_REGION, AWS_REGION, AWS_DEFAULT_REGION, the AWS profile, or the "
        "instance's metadata)",
    )
    options.add_argument("--aws-endpoint-url", default=env("EVERSTEP_AWS_ENDPOINT_URL"), help="URL of the local cloud")
    options.add_argument(
        "--aws-s3-endpoint-url",
        metavar="URL",
        help="URL of another S3 server (default: the S3 of --aws-endpoint-url)",
    )
    options.add_argument(
        "--aws-keys-file",
        type=Path,
        default=env("EVERSTEP_AWS_KEYS_FILE"),
        help="file with the local cloud's access key, which `everstep local up` creates",
    )
    return options


def cloud(given: argparse.Namespace) -> CloudSettings:
    """Return the cloud that the options name. Raises UnusableKeys if no key can be read, or RegionUnknown."""
    return CloudSettings(
        mode=CloudMode(given.mode),
        region=given.region or (find_region() if given.mode == CloudMode.AWS else ""),
        endpoint_url=given.aws_endpoint_url,
        s3_endpoint_url=given.aws_s3_endpoint_url,
        keys=LocalKeys.read(Path(given.aws_keys_file)) if given.aws_keys_file else None,
    )
