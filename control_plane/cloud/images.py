"""Reads when machine images were created.

The call selects images by the filter `image-id`. With the parameter `ImageIds`, EC2 refuses the whole call if one image
is deregistered or not shared with the account.
Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeImages.html
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final

from control_plane.cloud.connection import translated

IMAGES_PER_CALL: Final = 200
"""EC2's limit for the values of a filter."""


def creation_times(ec2: Any, image_ids: Collection[str]) -> Mapping[str, datetime]:
    """Return the creation times of images with EC2's client `ec2` (see `CloudOperator.image_times`)."""
    ids, times = sorted(set(image_ids)), dict[str, datetime]()
    for start in range(0, len(ids), IMAGES_PER_CALL):
        # An old node may run an image that its owner has deprecated, as AWS does with its own images, or disabled.
        with translated():
            pages = ec2.get_paginator("describe_images").paginate(
                Filters=[{"Name": "image-id", "Values": ids[start : start + IMAGES_PER_CALL]}],
                IncludeDeprecated=True,
                IncludeDisabled=True,
                PaginationConfig={"PageSize": IMAGES_PER_CALL},
            )
            images = [image for page in pages for image in page["Images"]]
        dates = {image["ImageId"]: image.get("CreationDate") for image in images}
        times |= {image_id: datetime.fromisoformat(date) for image_id, date in dates.items() if date}
    return times
