"""Adapters for the supported ways to train.

These are plain torch, DDP, FSDP2 and DeepSpeed ZeRO. All of them restore bit for bit.
"""
