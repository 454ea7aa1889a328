"""Writes wheels for a test's requirements.txt, without a network and without a build."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str, module: str | None = None, code: str = "", requires: str = ""
) -> Path:
    """Write a wheel with one module and return the path of the wheel.

    Args:
        folder: where the wheel is written; created if it does not exist.
        name: name of the distribution.
        version: version of the distribution.
        module: name of the module; None uses the name of the distribution.
        code: source of the module, in addition to VERSION, which equals the wheel's version.
        requires: one requirement of the distribution; an empty string means none.

    Returns:
        The path of the wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{module or name}.py": f"VERSION = {version!r}\n{code}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return path
