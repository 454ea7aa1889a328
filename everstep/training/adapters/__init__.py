"""Contains the adapters, which capture and restore models and optimizers: one adapter per training framework.

Adapters exist for plain torch, DDP, FSDP2 and DeepSpeed ZeRO. Training after a restore is bit-identical to training
without the interruption.
"""
