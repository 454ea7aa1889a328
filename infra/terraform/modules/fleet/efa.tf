# Network interfaces of types with accelerators and several network cards. Other types have one ordinary interface.
#
# By AWS's layouts for P5, P6-B200 and P6-B300, each card with EFA has an EFA-only interface. Card 0 and some others have
# an ordinary interface with an IP address, which carries TCP: replicas, S3 and the control plane. P5 and P5e support
# such an interface on every fourth card, which is one per GPU. The same rule gives P6-B300 nine of 17 possible ones.
# Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html

data "aws_ec2_instance_type" "this" {
  instance_type = var.instance_type
}

locals {
  type = data.aws_ec2_instance_type.this

  card_count        = coalesce(local.type.maximum_network_cards, 1)
  efa_count         = coalesce(local.type.efa_maximum_interfaces, 0)
  accelerator_count = sum(concat([0], local.type.gpus[*].count, local.type.neuron_devices[*].count))

  # The primary card of P6-B300 has no EFA: the type has one card more than EFA interfaces.
  first_efa_card   = max(0, local.card_count - local.efa_count)
  cards_per_device = max(1, floor(local.efa_count / max(1, local.accelerator_count)))

  cards = local.card_count == 1 || local.efa_count == 0 || local.accelerator_count == 0 ? [] : [
    for card in range(local.card_count) : {
      index  = card
      efa    = card >= local.first_efa_card
      has_ip = card == 0 || (card >= local.first_efa_card && (card - local.first_efa_card) % local.cards_per_device == 0)
    }
  ]

  # On card 0, the ordinary interface comes first: EC2 refuses an EFA-only interface as the primary one.
  derived_interfaces = concat(
    [for card in local.cards : { card = card.index, device = card.index == 0 ? 0 : 1, kind = "interface" } if card.has_ip],
    [for card in local.cards : { card = card.index, device = card.index == 0 ? 1 : 0, kind = "efa-only" } if card.efa],
  )
  interfaces = var.network_interfaces == null ? local.derived_interfaces : var.network_interfaces
}
