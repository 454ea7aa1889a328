"""Contains the adapters, which capture and restore models and optimizers: one adapter per training framework."""
