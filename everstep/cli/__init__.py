"""Implements the command line: one module per noun. All modules use the client of `everstep.client`.

Invariant: a command prints its result to stdout and everything else to stderr. With `--output json`, stdout is one JSON
document.
"""
