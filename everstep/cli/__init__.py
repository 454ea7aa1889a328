"""The command line: one file a noun, all of them over `everstep.client`.

Invariant: a command prints its result to stdout and everything else to stderr; with `--output json` stdout is one JSON
document.
"""
