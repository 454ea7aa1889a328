"""The user's source tree on this node: fetched, checked, unpacked.

What is unpacked is this process's, and readable by all who can come so far: ranks can run it, and where their user is another, not change it.

Invariant: nothing of an archive that is not exactly what the plan names, or that would write outside its folder, ever reaches the disk unpacked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from pathlib import Path

from everstep.protocol.plan import ScriptPlan
from worker.errors import SourceRefused

MAX_UNPACKED_BYTES = 4 * 1024**3


def unpack(archive: Path, script: ScriptPlan, folder: Path) -> Path:
    """Unpack a fetched source archive; doing it again gives the same tree.

    Args:
        archive: the gzipped tar as fetched.
        script: what the plan says of it.
        folder: where the tree goes; replaced when it is there.

    Returns:
        The entry point within `folder`.

    Raises:
        SourceRefused: another digest, an unsafe member, too large, or no such entry point.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != script.source.sha256:
        raise SourceRefused(f"the source archive hashes to {found}; the plan says {script.source.sha256}")
    scratch = folder.with_name(folder.name + ".new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            size = 0
            for member in tar:
                size += member.size
                if not (member.isfile() or member.isdir()):
                    raise SourceRefused(f"{member.name!r} in the source archive is neither a file nor a folder")
                if size > MAX_UNPACKED_BYTES:
                    raise SourceRefused(f"the source archive unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
                tar.extract(member, scratch, filter=_readable)
        for parent, _, _ in os.walk(scratch):
            os.chmod(parent, 0o755)
    except (tarfile.TarError, OSError, EOFError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise SourceRefused(f"the source archive is not sound: {error}") from error
    except SourceRefused:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    scratch.replace(folder)
    entry = (folder / script.entry_point).resolve()
    if not entry.is_relative_to(folder.resolve()) or not entry.is_file():
        raise SourceRefused(f"EntryPoint {script.entry_point!r} is not a file of the source tree")
    return entry


def _readable(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Return what is unpacked for a member: what Python's own filter lets pass, with two modes for whoever packed it and whatever the umask."""
    passed = tarfile.data_filter(member, folder)
    return passed if passed.isdir() else passed.replace(mode=0o755 if (member.mode or 0) & 0o100 else 0o644, deep=False)
