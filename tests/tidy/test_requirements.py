"""The locked packages: each has a hash, and a locked version satisfies each requirement of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONAL = PROJECT["project"]["optional-dependencies"]
OURS = "everstep"


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Return the version and the number of hashes of each package in a lock file, by the package's name."""
    found = {}
    for entry in (ROOT / "requirements" / name).read_text().replace("\\\n", " ").splitlines():
        requirement, *hashes = re.split(r"\s+--hash=sha256:", entry)
        parsed = Requirement(requirement)
        (pin,) = parsed.specifier
        assert pin.operator == "==", entry
        assert all(re.fullmatch("[0-9a-f]{64}", value.strip()) for value in hashes), entry
        found[canonicalize_name(parsed.name)] = (pin.version, len(hashes))
    return found


def required(requirements: list[str]) -> list[Requirement]:
    """Return the packages of other projects in a list of requirements, including those of Everstep's extras."""
    found = []
    for one in map(Requirement, requirements):
        found += required([text for extra in one.extras for text in OPTIONAL[extra]]) if one.name == OURS else [one]
    return found


BUILD = required(PROJECT["dependency-groups"]["build"])
DEVELOPMENT = required([*PROJECT["project"]["dependencies"], *OPTIONAL["dev"], *OPTIONAL["check"], *OPTIONAL["web"]])


INSTALLER = required(PROJECT["dependency-groups"]["installer"])


@pytest.mark.parametrize(
    ("name", "requirements"), [("uv.txt", INSTALLER), ("build.txt", BUILD), ("development.txt", DEVELOPMENT)]
)
def test_each_requirement_is_locked_with_a_hash(name: str, requirements: list[Requirement]) -> None:
    packages = locked(name)
    assert [package for package, (_, hashes) in packages.items() if not hashes] == []
    for requirement in requirements:
        if requirement.name != "torch":
            version, _ = packages[canonicalize_name(requirement.name)]
            assert version in requirement.specifier, requirement


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("local.txt", ("local",)),
        ("web.txt", ("web",)),
        ("node.txt", ("worker", "training")),
        ("server.txt", ("server", "postgres")),
    ],
)
def test_a_part_has_the_locked_packages_of_its_extras(name: str, extras: tuple[str, ...]) -> None:
    packages, development = locked(name), locked("development.txt")
    assert [package for package, (_, hashes) in packages.items() if not hashes] == []
    assert {each: pin for each, pin in packages.items() if each in development} == {
        each: pin for each, pin in development.items() if each in packages
    }
    for requirement in required([*PROJECT["project"]["dependencies"], *(f"everstep[{extra}]" for extra in extras)]):
        if requirement.name != "torch":
            version, _ = packages[canonicalize_name(requirement.name)]
            assert version in requirement.specifier, requirement


def test_torch_is_pinned_within_the_bounds() -> None:
    pin = re.search(r"^torch==(\S+)$", (ROOT / "requirements/torch.txt").read_text(), re.MULTILINE)
    assert pin is not None
    assert {pin.group(1) in one.specifier for one in DEVELOPMENT if one.name == "torch"} == {True}
    assert "torch" not in locked("development.txt")
