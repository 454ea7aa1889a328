"""Reads and writes the control plane's database, with one module per kind of record.

Functions accept and return frozen dataclasses.

Invariant: functions of this package never return ORM rows. While a transaction is open, its thread sends no requests to
AWS, to agents or to other servers.
"""
