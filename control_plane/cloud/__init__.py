"""Access to the cloud: Auto Scaling groups, instances and S3.

`CloudOperator` and `ServiceStore` are Protocols, each with one implementation over boto3 and one in memory for tests.
"""
