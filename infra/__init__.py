"""Contains the local cloud, which emulates AWS on one machine for development and tests."""
