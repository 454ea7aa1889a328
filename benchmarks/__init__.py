"""Benchmarks of Everstep. Each benchmark measures a value and a floor.

A floor is a bound that no system can beat on this machine, such as the time of a plain memcpy.

    first.py              make bench-first: one local cluster, the three measurements below, the report
    snapshot_blocking.py  seconds for which a snapshot blocks the training thread, compared with a memcpy
    slowdown.py           step time of a real model with and without an agent, in pairs
    recovery.py           seconds from a kill to the next new step, from the incident and measured from outside
    measures.py           medians, spread, and the rule for an inconclusive measurement (pure)
    document.py           the sections of docs/benchmarks.md, one per harness (pure)
    report.py, chart.py   .everstep/bench/first.json and docs/benchmarks.md
    faults/               make bench-faults: steps with stopped agents, slow or reset connections and full memory
    scale/                make bench-scale: placement for up to 10,000 nodes, rounds of up to 1,024 agents
    device/               make bench-device: capture, restore and every-step snapshots on a GPU, and PCIe floors
    data_plane/           make bench-data-plane: the data plane, compared checkpoint systems and floors

Invariant: every measurement is reported. If its floor changed meanwhile, the report marks the measurement as
inconclusive. No benchmark repeats a measurement to improve its result.
"""
