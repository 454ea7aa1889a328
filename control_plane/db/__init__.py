"""Reads and writes the control plane's database, with one module per kind of record.

A `session` comes from `Database.write` for functions that change rows, otherwise from `Database.read`. Times are in
UTC. Functions with a `lease` raise StaleLease, and write nothing, if another server has taken it over.

Functions accept and return frozen dataclasses, never ORM rows. While a transaction is open, its thread sends no
requests to AWS, to agents or to other servers.
"""
