"""What Everstep runs on: the local cloud here, Terraform and units later."""
