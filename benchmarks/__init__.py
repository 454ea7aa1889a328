"""Benchmarks of Everstep. Each measures a figure together with a floor of the machine to compare it with.

    first.py              make bench-first: one local cluster, the three measurements below, the report
    snapshot_blocking.py  seconds for which a snapshot blocks the training thread, beside memcpy and steps without
        snapshots
    slowdown.py           a real model's step with and without an agent, in pairs
    recovery.py           seconds from a kill to the next new step, from the incident and measured from outside
    measures.py           medians, spread, and when a figure is inconclusive (pure)
    document.py           the sections of docs/benchmarks.md, one per harness (pure)
    report.py, chart.py   .everstep/bench/first.json and docs/benchmarks.md
    faults/               make bench-faults: steps with stopped agents, slow or reset connections and full memory
    scale/                make bench-scale: placement for up to 10,000 nodes, rounds of up to 1,024 agents
    device/               make bench-device: capture, restore and every-step snapshots on a GPU, beside PCIe
    data_plane/           make bench-data-plane: the data plane beside its peers, floors and limits

Invariant: a figure whose floor changed during the measurement is kept and marked. It is never repeated until it looks
better.
"""
