"""The cloud as the control plane uses it: Auto Scaling groups, instances and S3, behind Protocols with one boto3 implementation each."""
