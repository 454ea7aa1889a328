"""Benchmark of Everstep on a GPU: `make bench-device`.

__main__.py       the harness: checks the device, runs each part in its own process, writes the page of results
parts.py          the parts, each run in a separate process with a time limit
gpt.py            the part that needs a cluster: it trains a GPT in a job of two nodes
rank/probe.py     identification of the device
rank/hardware.py  operations on the GPU; tests of the benchmark use host memory in place of a GPU
rank/state.py     a model with its optimizer, and slots for its state, without an agent
rank/copying.py   the parts that measure capture and restore, and their floors
rank/graph.py     the part that captures a CUDA graph while a snapshot is copied
rank/train.py     script of the job: steps with and without snapshots in turn, then snapshots that are compared
rows.py           conversion of measurements to rows with verdicts (pure)
report.py         results, limits, and the page in `docs/` (pure except for `earlier`)
"""
