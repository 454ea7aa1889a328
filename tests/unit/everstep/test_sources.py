from __future__ import annotations

import io
import os
import subprocess
import tarfile

import pytest

from everstep import sources
from everstep.errors import SourceRefused


def packed(directory) -> tuple[str, bytes]:
    file = io.BytesIO()
    return sources.pack(directory, file), file.getvalue()


@pytest.fixture
def code(tmp_path):
    directory = tmp_path / "code"
    (directory / "pkg").mkdir(parents=True)
    (directory / "train.py").write_text("import pkg\n")
    (directory / "pkg/__init__.py").write_text("")
    (directory / "run.sh").write_text("#!/bin/sh\n")
    (directory / "run.sh").chmod(0o775)
    return directory


def test_the_same_files_are_the_same_bytes(code, tmp_path):
    first = packed(code)
    for path in code.rglob("*"):
        os.utime(path, (1, 1))
    (code / "train.py").chmod(0o600)
    assert packed(code) == first
    code.rename(tmp_path / "elsewhere")
    assert packed(tmp_path / "elsewhere") == first


def test_any_other_content_is_another_source(code):
    before = packed(code)[0]
    (code / "train.py").write_text("import pkg \n")
    assert packed(code)[0] != before


def test_an_archive_has_the_files_sorted_and_nobody_s_name(code):
    with tarfile.open(fileobj=io.BytesIO(packed(code)[1]), mode="r:gz") as archive:
        members = archive.getmembers()
    assert [(member.name, member.mode) for member in members] == [
        ("pkg", 0o755),
        ("pkg/__init__.py", 0o644),
        ("run.sh", 0o755),
        ("train.py", 0o644),
    ]
    assert {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in members} == {
        (0, 0, "", "", 0)
    }


@pytest.mark.parametrize("name", [".git", "__pycache__", ".venv", ".everstep"])
def test_version_control_and_caches_are_left_out(code, name):
    before = packed(code)
    (code / "pkg" / name).mkdir()
    (code / "pkg" / name / "x").write_text("x")
    (code / "stray.pyc").write_bytes(b"x")
    assert packed(code) == before


def test_links_are_refused_by_name(code):
    (code / "pkg/data").symlink_to("/etc")
    with pytest.raises(SourceRefused, match=r"pkg/data is a link \(to /etc\)"):
        packed(code)


def test_special_files_are_refused(code):
    os.mkfifo(code / "pipe")
    with pytest.raises(SourceRefused, match="pipe is neither a file nor a directory"):
        packed(code)


def test_there_must_be_something(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceRefused, match="contains no file"):
        packed(tmp_path / "empty")
    with pytest.raises(SourceRefused, match="is not a directory"):
        packed(tmp_path / "absent")


FILES = [
    "train.py",
    "a.log",
    "data/x.bin",
    "pkg/data/y.bin",
    "pkg/a.log",
    "pkg/keep.log",
    "pkg/deep/er/z.tmp",
    "pkg/cache",
    "cache/c",
    "n1.txt",
    "n2.txt",
    "na.txt",
]


@pytest.mark.parametrize(
    ("ignore", "left_out"),
    [
        ("", []),
        ("# *.py\n\n", []),
        ("*.log", ["a.log", "pkg/a.log", "pkg/keep.log"]),
        ("*.log\n!keep.log", ["a.log", "pkg/a.log"]),
        ("!keep.log\n*.log", ["a.log", "pkg/a.log", "pkg/keep.log"]),
        ("/data", ["data/x.bin"]),
        ("data", ["data/x.bin", "pkg/data/y.bin"]),
        ("cache/", ["cache/c"]),
        ("cache", ["cache/c", "pkg/cache"]),
        ("pkg/*.log", ["pkg/a.log", "pkg/keep.log"]),
        ("pkg/**/*.tmp", ["pkg/deep/er/z.tmp"]),
        ("**/a.log", ["a.log", "pkg/a.log"]),
        ("pkg/**", ["pkg/data/y.bin", "pkg/a.log", "pkg/keep.log", "pkg/deep/er/z.tmp", "pkg/cache"]),
        ("n[0-9].txt", ["n1.txt", "n2.txt"]),
        ("n[!0-9].txt", ["na.txt"]),
        ("n?.txt", ["n1.txt", "n2.txt", "na.txt"]),
        ("data\n!data/x.bin", ["data/x.bin", "pkg/data/y.bin"]),
        (".log", []),
    ],
)
def test_what_the_user_leaves_out(tmp_path, ignore, left_out):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".everstepignore").write_text(ignore)
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path)[1])) as archive:
        found = {entry.name for entry in archive if entry.isfile()}
    assert {*FILES, ".everstepignore"} - found == set(left_out)


@pytest.mark.parametrize(("ignore", "is_packed"), [(None, False), ("*.log\n", False), ("!/output\n", True)])
def test_results_of_an_earlier_run_are_left_out(code, ignore, is_packed):
    (code / "output").mkdir()
    (code / "output" / "model.pt").write_bytes(b"weights")
    (code / "pkg" / "output").mkdir()
    (code / "pkg" / "output" / "writer.py").write_text("")
    if ignore is not None:
        (code / ".everstepignore").write_text(ignore)
    with tarfile.open(fileobj=io.BytesIO(packed(code)[1])) as archive:
        names = archive.getnames()
    assert ("output/model.pt" in names) is is_packed
    assert "pkg/output/writer.py" in names, "only the directory at the top is that of results"


def test_a_link_that_is_left_out_is_no_obstacle(code):
    (code / "data").symlink_to("/datasets")
    (code / ".everstepignore").write_text("/data\n")
    packed(code)


def test_patterns_that_cannot_be_read_are_refused(code):
    (code / ".everstepignore").write_bytes(b"\xff\n")
    with pytest.raises(SourceRefused, match="not UTF-8"):
        packed(code)
    (code / ".everstepignore").write_text("[z-a]\n")
    with pytest.raises(SourceRefused, match="is not a valid pattern"):
        packed(code)


def names(directory) -> set[str]:
    return {path for path, _ in sources.listing(directory).files}


def write(directory, **files) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_gitignore_is_honoured_and_everstepignore_decides(code):
    write(code, **{"data/a.csv": "", "data/b.csv": "", "pkg/data/c.csv": "", ".gitignore": "*.csv\n"})
    write(code, **{"pkg/.gitignore": "!c.csv\n", ".everstepignore": "!/data/a.csv\n/run.sh\n"})
    assert {"data/a.csv", "pkg/data/c.csv", "train.py"} <= names(code)
    assert {(each.path, each.reason) for each in sources.listing(code).left_out} == {
        ("data/b.csv", ".gitignore: *.csv"),
        ("run.sh", ".everstepignore: /run.sh"),
    }


@pytest.mark.parametrize(
    ("files", "left_out"),
    [
        ({".env": "", "pkg/.env": ""}, {".env", "pkg/.env"}),
        ({"env/pyvenv.cfg": "", "env/lib/x.py": ""}, {"env/"}),
        ({"env/pyvenv.txt": ""}, set()),
        ({"wandb/run-20260102_030405-ab12/files": ""}, {"wandb/"}),
        ({"wandb/__init__.py": "", "wandb/run-1": ""}, set()),
    ],
)
def test_what_is_no_code_is_left_out_by_what_it_is(code, files, left_out):
    """A directory named `wandb` or `env` may contain code, so its content decides."""
    write(code, **files)
    assert {each.path for each in sources.listing(code).left_out} == left_out
    write(code, **{".everstepignore": "".join(f"!{each}\n" for each in left_out)})
    assert sources.listing(code).left_out == ()


def test_a_large_file_is_refused_until_the_user_decides(code):
    write(code, **{"data/train.bin": "", "small.bin": ""})
    os.truncate(code / "data/train.bin", sources.LARGE_BYTES + 1)
    os.truncate(code / "small.bin", sources.LARGE_BYTES)
    with pytest.raises(SourceRefused, match=r"data/train\.bin has 64 MiB") as caught:
        packed(code)
    assert "!/data/train.bin" in caught.value.hint
    write(code, **{".everstepignore": "!/data/train.bin\n"})
    assert "data/train.bin" in names(code)
    write(code, **{".everstepignore": "/data/train.bin\n"})
    assert names(code).isdisjoint({"data/train.bin"})


@pytest.mark.parametrize(
    "pattern",
    [
        "??txt",
        "[[:alnum:]]b",
        "\ufeff*.log",
        "x[[]1].py",
        "b/**/c",
        "**",
        "*/",
        "!*.py\n*",
        "a\\ b ",
        "*.log\r",
        "**/b/**",
    ],
)
def test_patterns_mean_what_they_mean_to_git(tmp_path, pattern):
    for name in ("a.log", "é.txt", "ab", "a]b", "x[1].py", "b/c/d.py", "b/x/c", "z/b/y", "a b"):
        write(tmp_path, **{name: ""})
    (tmp_path / ".gitignore").write_text(f"{pattern}\n", encoding="utf-8")
    git = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    listed = subprocess.run([*git, "ls-files", "-oz", "--exclude-standard"], capture_output=True, check=True, text=True)
    assert names(tmp_path) == set(filter(None, listed.stdout.split("\0")))
