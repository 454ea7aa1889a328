"""Programs of a benchmark's rank processes.

They also run in the peers' virtual environments, so they use the standard library and torch only.

    state.py         the state that every system keeps, and synchronization of the two ranks
    adapter.py       operations of a system under test (Protocol)
    loop.py          the measured loop over an adapter
    peer.py          the program of one rank of a peer: python -m benchmarks.data_plane.rank.peer
    floors.py        the program of one rank that measures floors on request
    everstep_job.py  the same loop for Everstep, as a job's script; it uses a session directly, like users
    systems/         one adapter per peer
"""
