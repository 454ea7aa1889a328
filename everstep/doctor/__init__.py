"""Checks an installation, a node or a bucket, and advises what to repair (`everstep doctor`)."""
