"""Contains the local cloud, which emulates AWS for development and tests, and the Terraform modules for AWS."""
