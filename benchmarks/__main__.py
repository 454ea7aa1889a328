"""Renders the pages of all benchmarks again from their stored results, without measuring: `python -m benchmarks`."""

from __future__ import annotations

from benchmarks.api.report import PAGE as API
from benchmarks.dashboard.report import PAGE as DASHBOARD
from benchmarks.data_plane.report import PAGE as DATA_PLANE
from benchmarks.device.report import PAGE as DEVICE
from benchmarks.durable.report import PAGE as DURABLE
from benchmarks.faults.report import PAGE as FAULTS
from benchmarks.first.report import PAGE as FIRST
from benchmarks.integrations.report import PAGE as INTEGRATIONS
from benchmarks.interleave.report import PAGE as INTERLEAVE
from benchmarks.interruption.report import PAGE as RECOVERY
from benchmarks.page import render_again
from benchmarks.parity.report import PAGE as PARITY
from benchmarks.scale.report import PAGE as SCALE

PAGES = (API, DASHBOARD, DATA_PLANE, DEVICE, DURABLE, FAULTS, FIRST, INTEGRATIONS, INTERLEAVE, PARITY, RECOVERY, SCALE)

if __name__ == "__main__":
    for page in PAGES:
        if page.results.exists():
            render_again(page, page.results, page.document)
