"""Reads checkpoints outside of training jobs: one tensor at a time, verified, without pickle and without torch.

    with open_checkpoint("s3://bucket/checkpoints/x/run=…/gen=3/step=900/manifest.json") as checkpoint:
        for tensor in checkpoint.tensors.values():
            data = checkpoint.read(tensor)

- `checkpoint` opens a checkpoint and reads whole logical tensors.
- `logical` joins the parts of the ranks' shards into logical tensors: whole parameters and optimizer states.
- `shard_object` reads and verifies the stored object of one shard.
- `stores` reads and writes files and S3 objects.
- `memory` reads the state of a running job, from its nodes' memory.
- `export` writes safetensors files that Hugging Face libraries open.
- `dcp` lets `torch.distributed.checkpoint` load a checkpoint. `dcp` and all modules below need torch.
- `dcp_export` writes a directory that `torch.distributed.checkpoint` reads without Everstep.
- `universal` writes DeepSpeed's universal layout.
- `casting` converts tensors to a different floating point type, and `torch_files` writes files of `torch.save`.
"""

from __future__ import annotations

from everstep.checkpoints.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
