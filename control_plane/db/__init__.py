"""The database: one module per noun.

Functions accept and return frozen dataclasses.

Invariant: ORM rows never leave this package. No code calls anything outside the database while a transaction is open.
"""
