"""What a GPU says of Everstep: `make bench-device`.

    __main__.py       the command: looks for a device, runs each part by itself, the report
    parts.py          the parts, and how one is run: in a process of its own, with a time limit
    gpt.py            the part that needs a cluster: a real GPT under a real agent
    rank/probe.py     which device there is
    rank/hardware.py  what the parts need of a device: a GPU, or the host's memory, on which tests run them
    rank/state.py     a model, its optimizer and slots of a chosen size, without an agent
    rank/copying.py   capture and restore beside the floors, registration
    rank/graph.py     a training step captured as a graph while a snapshot is under way
    rank/train.py     the job's script: steps with and without snapshots in turn, then steps of which every kept byte is compared
    rows.py           samples become rows, and rows verdicts (pure)
    report.py         .everstep/bench/device.json and docs/benchmarks-device.md

Invariant: a figure comes from a device or is not reported; a part that fails is a row that falls short, and takes no
other part with it.
"""
