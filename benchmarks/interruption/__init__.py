"""How long a failure holds training: the same model, the same kill, under Everstep, torchrun and torchft (`make bench-recovery`)."""
