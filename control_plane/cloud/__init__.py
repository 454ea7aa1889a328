"""The cloud as the control plane uses it: Auto Scaling groups, instances and S3.

Each of them is a Protocol with one boto3 implementation, and a fake in memory for tests.
"""
