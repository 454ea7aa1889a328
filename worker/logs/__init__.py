"""Handles log lines of ranks: stores them on disk, copies them to other nodes, and uploads them to the object store."""
