"""What a program reads of its own machine, and how it speaks to systemd and to people who read its log."""
