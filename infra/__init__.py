"""The infrastructure that Everstep runs on: the local cloud, which emulates AWS on one machine."""
