"""Programs of the benchmark's rank processes.

The programs also run in the virtual environments of the compared systems, so they import only the standard library and
torch.

    state.py         the training state that every system protects, and synchronization of the two ranks
    adapter.py       interface of the operations of a compared system (Protocol)
    loop.py          the measured training loop, which calls an adapter
    peer.py          the program of one rank of a compared system: python -m benchmarks.data_plane.rank.peer
    floors.py        the program of one process that measures lower bounds (floors) on request
    everstep_job.py  the same loop for Everstep, as a job's script with a session
    systems/         one adapter per compared system
"""
