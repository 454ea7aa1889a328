"""Benchmarks of Everstep. Most of them compare a measured value with a floor.

A floor is a bound that no system can beat on this machine, such as the time of a plain memcpy. A package has its
measurements in `__main__.py`, and its results and page, stored in `docs/`, in `report.py`.

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

Invariant: every measurement is reported. If its floor changed during the measurement, it is marked as inconclusive. No
benchmark repeats a measurement to improve its result.
"""
