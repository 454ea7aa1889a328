"""One adapter per peer, each written as the peer's own documentation recommends."""
