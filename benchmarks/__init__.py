"""Benchmarks of Everstep. Most of them compare a measured value with a floor.

A floor is a bound that no system can beat on this machine, such as the time of a plain memcpy.

    first/         make bench-first: time that snapshots block training, slowdown of a model, recovery times
    data_plane/    make bench-data-plane: the data plane, compared systems and floors
    interleave/    make bench-interleave: snapshots between collectives on a shared network
    interruption/  make bench-recovery: interruptions by failures, compared with torchrun and torchft
    faults/        make bench-faults: steps with stopped agents, slow or reset connections and full memory
    scale/         make bench-scale: placement for up to 10,000 nodes, rounds of up to 1,024 agents
    durable/       make bench-durable: transfers to and from S3, by Everstep and by other clients
    parity/        make bench-parity: memory, steps and restores with parity, compared with two copies
    integrations/  make bench-integrations: steps of a transformers Trainer with Everstep, and with the Trainer's saves
    device/        make bench-device: capture, restore and every-step snapshots on a GPU, and PCIe floors
    api/           make bench-api: response times of the API, followed logs and the command line
    dashboard/     make bench-dashboard: the dashboard in Chromium

    command.py     the command line of every benchmark: options, a check of the machine's load, exit codes
    page.py        the renderer of every page, from stored results and a template in pages/ (pure)
    rows.py        measured values, limits, verdicts (whether a value meets its limit), and their table (pure)
    picture.py     bars as SVG (pure)
    measures.py    medians, spread, and the rule for an inconclusive measurement (pure)

A package has its measurements in `__main__.py`, and its results and page in `report.py`. Its results and its page are
stored in `docs/`. `python -m benchmarks` renders all pages again from stored results.

Invariant: every measurement is reported. If its floor changed during the measurement, the report marks the measurement
as inconclusive. No benchmark repeats a measurement to improve its result.
"""
