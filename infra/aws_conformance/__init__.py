"""`everstep aws-conformance`: observes in a real AWS account the behaviour that AWS's documentation leaves open."""
