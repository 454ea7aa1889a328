"""What the agent decides, without doing anything: which slot may be written, what a round commits, what a generation asks of this node."""
