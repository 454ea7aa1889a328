"""What this machine's firmware says of it: the one rule by which an EC2 instance is known.

Invariant: a file of the kernel is read, readable by everybody; nobody is asked, for elsewhere anybody may answer at a
link-local address. Source: Amazon EC2 User Guide, `Detect whether a host is an EC2 instance`.
"""

from __future__ import annotations

from pathlib import Path

DMI = Path("/sys/devices/virtual/dmi/id")


def is_ec2_instance(dmi: Path = DMI) -> bool:
    """Say whether this machine is an EC2 instance.

    Args:
        dmi: what the firmware says of the machine.

    Returns:
        Whether it names EC2; what cannot be read does not.
    """
    return any(_says(dmi / name) == "Amazon EC2" for name in ("sys_vendor", "bios_vendor"))


def _says(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
