"""Finds the AWS region of a server whose settings name no region, from these sources in order:

    AWS_REGION → AWS_DEFAULT_REGION → the profile in the AWS config file → the instance's metadata

Invariant: there is no default region. A server with a wrong region would find neither its groups nor its bucket.
"""

from __future__ import annotations

import os
import re
from typing import Final

import botocore.session
from botocore.exceptions import BotoCoreError
from botocore.utils import IMDSRegionProvider

from control_plane.cloud.errors import RegionUnknown

_REGION: Final = re.compile(r"[a-z]+(?:-[a-z]+)+-\d+")


def find_region() -> str:
    """Return the region that the environment of this process names, such as `eu-west-1`.

    Outside EC2, the call can take a few seconds, until the metadata service times out. Raises RegionUnknown if no
    source names a region.
    """
    session = botocore.session.Session()
    try:
        found = (
            os.environ.get("AWS_REGION")  # botocore itself does not read AWS_REGION.
            or session.get_config_variable("region")
            or IMDSRegionProvider(session).provide()
        )
    except BotoCoreError as error:
        raise RegionUnknown(f"the AWS region is unknown: {error}; set AWS_REGION or pass --region") from error
    region = _REGION.match(found or "")
    if region is None:
        what = f"{found!r} is not an AWS region" if found else "the AWS region is unknown"
        raise RegionUnknown(
            f"{what}: set AWS_REGION, pass --region, or give the profile in ~/.aws/config a region. On EC2, the server "
            "reads the region from the instance's metadata (IMDSv2), which must be enabled"
        )
    return region[0]
