output "server_instance_id" {
  description = "Instance of the control plane."
  value       = module.control_plane.instance_id
}

output "bucket" {
  description = "Bucket of the installation."
  value       = module.storage.bucket
}

output "group_name" {
  description = "Auto Scaling group of the fleet."
  value       = module.fleet.group_name
}

output "node_role_name" {
  description = "Role by which nodes join."
  value       = module.identity.node_role_name
}

output "next" {
  description = "The commands that follow."
  value       = <<-END
    1. Forward a port to the control plane, and leave this running:
         aws ssm start-session --region ${var.region} --target ${module.control_plane.instance_id} \
           --document-name AWS-StartPortForwardingSession --parameters portNumber=${local.port},localPortNumber=${local.port}
    2. In another terminal:
         export EVERSTEP_ENDPOINT_URL=http://127.0.0.1:${local.port}
         export EVERSTEP_TOKEN=$(aws secretsmanager get-secret-value --region ${var.region} \
           --secret-id ${module.secrets.prefix}admin-token --query SecretString --output text)
         everstep fleets create --name ${local.fleet} --auto-scaling-group ${module.fleet.group_name} --node-role-name ${module.identity.node_role_name}
    3. Submit a job, and watch http://127.0.0.1:${local.port} in a browser.
    4. End: everstep fleets delete ${local.fleet}, then terraform destroy.
  END
}
