"""Tests the pattern for names of jobs and fleets.

Names become parts of paths, tags and S3 keys. No other check rejects characters that are unsafe there.
"""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from control_plane.api.schemas.common import Name

NAMES = TypeAdapter(Name)


@pytest.mark.parametrize("text", ["gpt", "g-p-t", "7", "a" * 63])
def test_a_name(text: str) -> None:
    assert NAMES.validate_python(text) == text


@pytest.mark.parametrize("text", ["", "a" * 64, "-a", "a-", "a--b", "a/b", "..", "a.b", "a b", "gpt\n", "\ngpt", "ä"])
def test_no_name(text: str) -> None:
    with pytest.raises(ValidationError):
        NAMES.validate_python(text)
