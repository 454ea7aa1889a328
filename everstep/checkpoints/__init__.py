"""Reads checkpoints outside of training jobs: one tensor at a time, verified, without pickle and without torch.

    with open_checkpoint("s3://bucket/jobs/x/checkpoints/run=…/gen=3/step=900/manifest.json") as checkpoint:
        for tensor in checkpoint.tensors.values():
            data = checkpoint.read(tensor)

- `checkpoint` opens a checkpoint and reads whole logical tensors.
- `logical` joins the parts that the ranks hold into logical tensors.
- `shard_object` reads verified bytes of one shard's object.
- `stores` reads and writes files and S3 objects.
- `export` writes safetensors files that Hugging Face libraries open.
- `dcp` lets `torch.distributed.checkpoint` load a checkpoint. This module and the following ones need torch.
- `dcp_export` writes a directory that `torch.distributed.checkpoint` reads without Everstep.
- `universal` writes DeepSpeed's universal layout.
- `casting` converts tensors to another floating point type, and `torch_files` writes files of `torch.save`.
"""

from __future__ import annotations

from everstep.checkpoints.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
