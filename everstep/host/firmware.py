"""Detects EC2 instances by the firmware's vendor name.

Invariant: the module sends no network request. Outside EC2, any machine of the network could answer at the metadata
service's link-local address.

Source: Amazon EC2 User Guide, `Detect whether a host is an EC2 instance`.
"""

from __future__ import annotations

from pathlib import Path

DMI = Path("/sys/devices/virtual/dmi/id")


def is_ec2_instance(dmi: Path = DMI) -> bool:
    """Return whether this machine is an EC2 instance. False if the DMI fields in the directory `dmi` are unreadable."""
    return any(_says(dmi / name) == "Amazon EC2" for name in ("sys_vendor", "bios_vendor"))


def _says(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
