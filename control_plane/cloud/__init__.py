"""Access to the cloud: Auto Scaling groups, instances and S3.

`CloudOperator` and `ServiceStore` are Protocols. Each has one implementation with boto3, and one in memory for tests.
"""
