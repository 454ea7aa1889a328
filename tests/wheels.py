"""Wheels made by hand: what a requirements.txt of a test asks for, without a network and without a build."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str, module: str | None = None, code: str = "", requires: str = ""
) -> Path:
    """Write a wheel of one module.

    Args:
        folder: made if need be.
        name: of the distribution.
        version: likewise.
        module: its name; None: the distribution's.
        code: of the module; its VERSION is the wheel's.
        requires: a requirement of the distribution; empty: none.

    Returns:
        The file.
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
