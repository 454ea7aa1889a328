"""A training script that writes the inputs, package, secret and role that its rank received."""

import json
import os
from pathlib import Path

import boto3
import everstep_example

from everstep.training import input_dir


def files(channel: str) -> dict[str, str]:
    root = Path(input_dir(channel))
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


found = {
    "fetched": files("fetched"),
    "mounted": files("mounted"),
    "package": everstep_example.VERSION,
    "secret": os.environ["DATABASE_PASSWORD"],
    "role": boto3.client("sts").get_caller_identity()["Arn"],
}
Path(os.environ["EVERSTEP_OUTPUT_DIR"], "result.json").write_text(json.dumps(found))
