"""Program that runs one part: `python -m benchmarks.device.rank.part capture|restore|graph --device cuda …`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.device.rank import copying, graph
from benchmarks.device.rank.hardware import CUDA, HOST, Hardware, hardware_of

PARTS: dict[str, Callable[[Hardware, int, int, Path], dict[str, object]]] = {
    "capture": copying.capture,
    "restore": copying.restore,
    "graph": graph.survives,
}


def main() -> None:
    """Run the part of the command line, and write its result to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.rank.part")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=(CUDA, HOST), required=True)
    parser.add_argument("--bytes", type=int, required=True, help="of the state")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="on tmpfs")
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    hardware = hardware_of(arguments.device)
    found = PARTS[arguments.part](hardware, arguments.bytes, arguments.rounds, arguments.folder)
    arguments.result.write_text(json.dumps({"device": hardware.device.type, **found}))


if __name__ == "__main__":
    main()
