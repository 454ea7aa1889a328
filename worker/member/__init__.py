"""One generation on one node: shards are loaded, ranks are served, rounds are run, and all work is ended."""
