"""Adapters that capture and restore the state of each supported training framework.

Adapters exist for plain torch, DDP, FSDP2 and DeepSpeed ZeRO. All of them restore bit for bit.
"""
