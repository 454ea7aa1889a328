output "load_balancer_name" {
  description = "DNS name of the load balancer, the target of the alias record of `domain_name`."
  value       = module.servers.load_balancer_name
}

output "bucket" {
  description = "Bucket of the installation."
  value       = module.storage.bucket
}

output "topic_arn" {
  description = "Topic that receives the alarms."
  value       = module.observability.topic_arn
}

output "next" {
  description = "The commands that follow."
  value       = <<-END
    1. Create an alias record for ${var.domain_name} with the target ${module.servers.load_balancer_name}.
    2. export EVERSTEP_ENDPOINT_URL=${local.url}
       export EVERSTEP_TOKEN=$(aws secretsmanager get-secret-value --region ${var.region} \
         --secret-id ${module.secrets.prefix}admin-token --query SecretString --output text)
    %{~for name, fleet in module.fleet~}
       everstep fleets create --name ${name} --auto-scaling-group ${fleet.group_name} \
         --node-role-name ${module.identity.node_role_name}
    %{~endfor~}
    3. End: everstep fleets delete for each fleet, terraform apply -var is_protected=false, then terraform destroy.
  END
}
