"""Benchmark of Everstep on a GPU: `make bench-device`.

    __main__.py       the command: checks the device, runs each part separately, writes the report
    parts.py          the parts, each run in a separate process with a time limit
    gpt.py            the part that needs a cluster: a real GPT under a real agent
    rank/probe.py     identification of the device
    rank/hardware.py  device operations of the parts, for a GPU or, in tests, for host memory
    rank/state.py     a model, its optimizer and slots of a chosen size, without an agent
    rank/copying.py   capture and restore with their floors, and registration of memory
    rank/graph.py     a training step captured as a CUDA graph while a snapshot is in progress
    rank/train.py     the job's script: steps with and without snapshots in turn, then steps whose bytes are compared
    rows.py           conversion of measurements to rows with verdicts (pure)
    report.py         results, limits and page (pure except for `earlier`)

A floor is a bound that no system can beat: the rate of plain copies between pinned memory and the device.

Invariant: every reported value was measured on a device. A part that fails becomes a row that misses its limit, and
does not affect other parts.
"""
