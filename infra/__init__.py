"""What Everstep runs on. So far one room: the local cloud, which stands in for AWS on one machine."""
