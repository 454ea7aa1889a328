"""What is remembered: one module per noun, frozen dataclasses in and out.

Invariant: a row never leaves this package, and nothing outside the database is called while a transaction is open.
"""
