"""The database: one module per kind of record.

Functions accept and return frozen dataclasses.

Invariant: ORM rows never leave this package. While a transaction is open, no code calls anything outside the database.
"""
