"""Prints the identification of the device as JSON, or a message with exit code 1, so that its caller needs no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

QUERY = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max")
UNKNOWN = "unknown"


def told_by_driver() -> dict[str, str]:
    """Return nvidia-smi's facts about the first device. A missing fact is `UNKNOWN`."""
    program = shutil.which("nvidia-smi")
    answers = [UNKNOWN] * len(QUERY)
    if program is not None:
        command = [program, "--id=0", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            said = ""
        fields = [field.strip() for field in said.strip().split(",")]
        if len(fields) == len(QUERY):
            answers = fields
    return dict(zip(("driver", "pcie_generation", "pcie_lanes"), answers, strict=True))


def main() -> int:
    """Print the device's identification, and return the exit code."""
    try:
        import torch
    except ImportError as error:
        print(f"torch cannot be imported: {error}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        print(f"torch {torch.__version__} {built} and sees no device", file=sys.stderr)
        return 1
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 1024**3, 1),
        "cuda": str(torch.version.cuda),
        "torch": str(torch.__version__),
        **told_by_driver(),
    }
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
