"""Measurements of Everstep, each with the floor that it can be held against.

    first.py              make bench-first: one local cluster, all of the below, the report
    snapshot_blocking.py  seconds a snapshot holds the training thread, beside memcpy and the step without snapshots
    slowdown.py           a real model's step with and without an agent, in pairs
    recovery.py           seconds from a kill to the next new step, from the incident and from outside
    measures.py           medians, spread, when a figure says nothing (pure)
    document.py           the sections of docs/benchmarks.md, one a harness (pure)
    report.py, chart.py   .everstep/bench/first.json and docs/benchmarks.md
    faults/               make bench-faults: steps while agents stand still, lines are slow or reset and memory is full
    scale/                make bench-scale: placement and its odds for up to 10,000 nodes, rounds of up to 1,024 agents
    device/               make bench-device: capture, restore and every-step snapshots on a GPU, beside PCIe
    data_plane/           make bench-data-plane: all of the data plane beside its peers and floors, with what it must reach

Invariant: a figure that was taken while its floor moved is kept and marked, never repeated until it looks better.
"""
