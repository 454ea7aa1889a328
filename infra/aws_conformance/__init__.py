"""`everstep aws-conformance`: asks a real account the questions that AWS's documentation leaves open."""
