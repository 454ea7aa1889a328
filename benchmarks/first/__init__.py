"""First measurements on one local cluster: blocked time of snapshots, slowdown of a real model, and recovery times."""
