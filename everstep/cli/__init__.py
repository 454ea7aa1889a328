"""The command line: one module per noun, each built on the client of `everstep.client`.

Invariant: a command prints its result to stdout and everything else to stderr. With `--output json`, stdout is one JSON
document.
"""
