"""Contains the local cloud, which emulates AWS for development and tests, and what installs Everstep on AWS."""
