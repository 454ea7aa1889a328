"""The ways to train that are known to come back bit for bit: plain torch, DDP, FSDP2, DeepSpeed ZeRO."""
