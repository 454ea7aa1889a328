"""The database: one module per kind of record.

Functions accept and return frozen dataclasses.

Invariant: functions of this package never return ORM rows. While a transaction is open, no code calls anything outside
the database.
"""
