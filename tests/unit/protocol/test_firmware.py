from __future__ import annotations

from pathlib import Path

from everstep.host.firmware import is_ec2_instance


def test_an_instance_is_known_by_its_firmware(tmp_path: Path) -> None:
    assert not is_ec2_instance(tmp_path)
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    (tmp_path / "bios_vendor").write_text("Xen\n")
    assert is_ec2_instance(tmp_path)
    (tmp_path / "sys_vendor").write_text("Xen\n")
    assert not is_ec2_instance(tmp_path)
