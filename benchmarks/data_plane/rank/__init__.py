"""What runs in the rank processes of a benchmark, also in the peers' own virtual environments: the standard library and torch, nothing else.

state.py         the state that every system keeps, and the meeting of the two ranks
adapter.py       what a system must do to be measured (Protocol)
loop.py          the measured loop over an adapter
peer.py          the program of one rank of a peer: python -m benchmarks.data_plane.rank.peer
floors.py        the program of one rank that measures floors when asked
everstep_job.py  the same loop for Everstep, as a job's script; it needs no adapter: the session is what users have
systems/         one adapter per peer
"""
