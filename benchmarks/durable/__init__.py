"""Clients for bulk transfer to S3, measured beside each other and beside Everstep's own store."""
