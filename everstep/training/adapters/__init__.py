"""Adapters for the supported ways to train.

Adapters exist for plain torch, DDP, FSDP2 and DeepSpeed ZeRO. All of them restore bit for bit.
"""
