"""Benchmark of clients for bulk transfer to S3, compared with Everstep's own store."""
