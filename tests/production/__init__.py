"""Tests of whole installations, run by `make test-production`."""
