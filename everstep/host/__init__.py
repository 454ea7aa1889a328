"""Reads facts about this machine, reports to systemd, and formats logs."""
