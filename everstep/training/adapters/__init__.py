"""Adapters for the supported ways to train: plain torch, DDP, FSDP2 and DeepSpeed ZeRO. All restore bit for bit."""
