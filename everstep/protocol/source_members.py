"""What one member of a source archive may be: the rule of the server, which inspects an archive, and of the agent, which unpacks it.

Invariant: pure, and nothing but the standard library: the server reads archives in a process with bounded memory. A
member that passes is a directory or a regular file with a clean relative path.
"""

from __future__ import annotations

import re
import tarfile
from typing import Final

PATH_BYTES: Final = 1024
PATH_DEPTH: Final = 64
"""Names in one path."""
_FORBIDDEN: Final = re.compile("[\\\\\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Backslashes, control characters, what changes the direction of text or ends a line, and halves of characters."""


class RefusedMember(Exception):
    """A member that no source archive may have; the message names the member and the fault."""


def clean_path(member: tarfile.TarInfo) -> str:
    """Return the path of a member in its shortest form.

    Server and agent call this for each member, before its content is read.

    Args:
        member: as `tarfile` has read its headers.

    Returns:
        A relative path without empty names and `.`; empty for the top directory alone.

    Raises:
        RefusedMember: a link, a device or a sparse file, a negative size, or a path that is absolute, too long, too
            deep or not clean.
    """
    name = member.name
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE) or member.issparse():
        raise RefusedMember(f"{name!r} is {_kind(member)}; only files and directories are taken")
    if member.size < 0:
        raise RefusedMember(f"{name[:80]!r} has {member.size} bytes")
    if len(name) > 4 * PATH_BYTES:
        raise RefusedMember(f"the path {name[:80]!r}… is longer than {PATH_BYTES} bytes")
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or _FORBIDDEN.search(name) is not None:
        raise RefusedMember(f"{name!r} is not a clean relative path")
    parts = [part for part in parts if part not in ("", ".")]
    path = "/".join(parts)
    if len(path.encode()) > PATH_BYTES:
        raise RefusedMember(f"the path {path[:80]!r}… is longer than {PATH_BYTES} bytes")
    if len(parts) > PATH_DEPTH:
        raise RefusedMember(f"the path {path[:80]!r}… is more than {PATH_DEPTH} names deep")
    if not path and not member.isdir():
        raise RefusedMember("a file without a name")
    return path


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym():
        return f"a symbolic link to {member.linkname!r}"
    if member.islnk():
        return f"a hard link to {member.linkname!r}"
    if member.isdev():
        return "a device or a pipe"
    return "of a special kind"
