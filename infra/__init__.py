"""The infrastructure that Everstep runs on: for now, the local cloud, which emulates AWS on one machine."""
