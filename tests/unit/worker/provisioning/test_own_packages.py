"""Packages of a job's own source are found in its requirements, and copied without running their code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from worker.errors import RequirementsRefused
from worker.provisioning import own_packages
from worker.provisioning.own_packages import copy_modules, expand

STATIC = "[project]\nname = 'mine'\nversion = '1'\ndependencies = ['numpy>=1', 'a @ https://h/a.whl']\n"


def expanded(
    source: Path, text: str, *, is_built: bool = False, name: str = "requirements.txt"
) -> tuple[str, list[str]]:
    found = expand(source, source / name, text, is_built=is_built)
    return found.text.replace(str(source), "SOURCE"), [str(each.relative_to(source)) for each in found.folders]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("numpy\n# -e .\n", "numpy\n# -e .\n"),
        ("-r more.txt\n--constraint=c.txt # why", "-r SOURCE/more.txt\n--constraint SOURCE/c.txt\n"),
        ("-f elsewhere", "-f elsewhere\n"),
        ("--find-links ./wheels\n-f https://h/wheels", "--find-links SOURCE/wheels\n-f https://h/wheels\n"),
        ("-e git+https://h/a.git#egg=a", "git+https://h/a.git#egg=a\n"),
        ("./a.whl\nwheels/b.whl", "SOURCE/a.whl\nwheels/b.whl\n"),
    ],
)
def test_other_lines_keep_their_meaning(tmp_path: Path, text: str, lines: str) -> None:
    for name in ("more.txt", "c.txt"):
        (tmp_path / name).touch()
    (tmp_path / "wheels").mkdir()
    assert expanded(tmp_path, text) == (lines, [])


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "more.txt").touch()
    assert expanded(tmp_path, "-r more.txt", name="inner/r.txt") == ("-r SOURCE/inner/more.txt\n", [])


@pytest.mark.security
def test_the_folder_of_an_editable_install_never_becomes_a_package_of_the_index(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RequirementsRefused, match=r"names \./mine, and"):
        expanded(tmp_path, "-e mine")
    (tmp_path / "mine" / "pyproject.toml").write_text(STATIC)
    assert expanded(tmp_path, "-e mine") == ("numpy>=1\na @ https://h/a.whl\n", ["mine"])
    assert expanded(tmp_path, "-e mine", is_built=True) == ("SOURCE/mine\n", [])


def test_a_static_package_becomes_its_dependencies(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(STATIC)
    assert expanded(tmp_path, "-e .") == ("numpy>=1\na @ https://h/a.whl\n", ["."])
    assert expanded(tmp_path, "-e .", is_built=True) == ("SOURCE\n", [])


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"pyproject.toml": "[build-system]\nrequires = []\n"},
        {"pyproject.toml": "not toml ="},
        {"pyproject.toml": "project = 3"},
        {
            "pyproject.toml": f"{STATIC}dynamic = ['dependencies']\n".replace(
                "dependencies = ['numpy>=1', 'a @ https://h/a.whl']\n", ""
            )
        },
        {"pyproject.toml": STATIC, "setup.py": "print()"},
    ],
    ids=["nothing", "no project", "no toml", "no table", "dynamic", "setup.py"],
)
def test_a_package_that_needs_a_build_is_refused_only_if_editable(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RequirementsRefused, match=r"names \.\[x\], and this node installs wheels only.*--allow-builds"):
        expanded(tmp_path, "-e .[x]")
    assert expanded(tmp_path, ".[x]") == ("SOURCE[x]\n", [])  # pip names what it cannot build
    assert expanded(tmp_path, "-e .[x]", is_built=True) == ("SOURCE[x]\n", [])


def test_a_folder_outside_of_the_source_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(STATIC)
    (tmp_path / "source").mkdir()
    with pytest.raises(RequirementsRefused, match=r"names \.\., and"):
        expanded(tmp_path / "source", "-e ..")


def test_modules_replace_what_a_package_of_the_index_has_installed(tmp_path: Path) -> None:
    source, layer, elsewhere = tmp_path / "source", tmp_path / "layer", tmp_path / "elsewhere"
    for name in ("src/mine/__init__.py", "src/single.py", "src/notes.txt", "tests/__init__.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("ours")
    elsewhere.mkdir()
    (layer / "single.py").parent.mkdir()
    (layer / "single.py").write_text("theirs")
    (layer / "mine").symlink_to(elsewhere)
    copy_modules([source], layer)
    assert (layer / "single.py").read_text() == (layer / "mine" / "__init__.py").read_text() == "ours"
    assert sorted(each.name for each in layer.iterdir()) == ["mine", "single.py"]
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_many_lines_name_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent cannot stop a thread that reads one file 50,000 times."""
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    read, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: read.append(given) or run(*given, **options))
    assert expanded(tmp_path, "-e .\n" * 5_000) == ("\n", ["."])
    assert len(read) == 1


@pytest.mark.parametrize(
    "content",
    [
        STATIC + "#" * (1 << 20),
        "project = {name = 1, dependencies = 5}",
        "project = {dynamic = 5}",
        "project = {optional-dependencies = 5}",
        "project = {dependencies = [1]}",
        "project = 5",
        "project.x = " + "[" * 5_000 + "]" * 5_000,
        "project." + "a." * 40_000 + "a = 1",
    ],
    ids=["large", "number", "dynamic", "optional", "no text", "no table", "deep", "gigabytes"],
)
def test_a_project_that_cannot_be_read_needs_a_build(tmp_path: Path, content: str) -> None:
    (tmp_path / "pyproject.toml").write_text(content)
    with pytest.raises(RequirementsRefused, match="this node installs wheels only"):
        expanded(tmp_path, "-e .")


def test_packages_of_the_source_and_their_requirements_are_limited(tmp_path: Path) -> None:
    many = "".join(f"./{number}\n" for number in range(own_packages.MOST_FOLDERS + 1))
    with pytest.raises(RequirementsRefused, match="more than 16 folders"):
        expanded(tmp_path, many)
    extras = "[project.optional-dependencies]\n" + "".join(f"a{number} = {['x'] * 100}\n" for number in range(200))
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'mine'\n{extras}")
    assert expanded(tmp_path, f".[{','.join(['a1'] * 5_000)}]")[0] == "x\n" * 100, "an extra counts once"
    with pytest.raises(RequirementsRefused, match="over 10000 lines"):
        expanded(tmp_path, f".[{','.join(f'a{number}' for number in range(200))}]")
