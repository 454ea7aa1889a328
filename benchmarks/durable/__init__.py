"""Benchmark of checkpoints in S3 and of training while they are stored: `make bench-durable`.

The benchmark compares Everstep's S3 client with other clients, and Everstep's checkpoints with
torch.distributed.checkpoint (DCP) and DeepSpeed.
"""
