"""What the control plane decides, without doing anything: what signals prove, what to do about a job and about a fleet, from which step a job goes
on, and who keeps whose shards.

Invariant: pure. What is seen, what is wanted and the time come in as frozen values, and a decision goes out as one: the
same input gives the same decision. Nothing here knows a database, a socket, AWS or a clock.
"""
