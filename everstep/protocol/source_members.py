"""Defines which members of a source archive are valid, for the server's inspection and the agent's unpacking.

Invariant: the module imports only the standard library, because the server inspects archives in a process with little
memory. A valid member is a directory or a regular file with a clean relative path.
"""

from __future__ import annotations

import re
import tarfile
from typing import Final

from everstep.protocol.visible_text import CONTROLS

PATH_BYTES: Final = 1024
PATH_DEPTH: Final = 64
"""Upper limit of a path's number of components."""
_FORBIDDEN: Final = re.compile(f"[\\\\{CONTROLS}]")


class RefusedMember(Exception):
    """A source archive contains an invalid member. The message names the member and the fault."""


def clean_path(member: tarfile.TarInfo) -> str:
    """Return the normalized relative path of a member, without `.` components; empty for the top directory. Callers
    check each member before they read its content. A path is at most `PATH_BYTES` long and `PATH_DEPTH` deep. Raises
    RefusedMember if the member is a link, device or sparse file, has a negative size, or has an invalid path.
    """
    name = member.name
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE) or member.issparse():
        raise RefusedMember(f"{name!r} is {_kind(member)}; the archive may contain only files and directories")
    if member.size < 0:
        raise RefusedMember(f"{name[:80]!r} has {member.size} bytes")
    if len(name) > 4 * PATH_BYTES:
        raise RefusedMember(f"the path {name[:80]!r}… is longer than {PATH_BYTES} bytes")
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or _FORBIDDEN.search(name) is not None:
        raise RefusedMember(f"{name!r} is not a normalized relative path")
    parts = [part for part in parts if part not in ("", ".")]
    path = "/".join(parts)
    if len(path.encode()) > PATH_BYTES:
        raise RefusedMember(f"the path {path[:80]!r}… is longer than {PATH_BYTES} bytes")
    if len(parts) > PATH_DEPTH:
        raise RefusedMember(f"the path {path[:80]!r}… is more than {PATH_DEPTH} names deep")
    if not path and not member.isdir():
        raise RefusedMember("a file has no name")
    return path


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym():
        return f"a symbolic link to {member.linkname!r}"
    if member.islnk():
        return f"a hard link to {member.linkname!r}"
    if member.isdev():
        return "a device or a pipe"
    return "a special file"
