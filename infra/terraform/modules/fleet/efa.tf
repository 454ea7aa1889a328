# Network cards of the instance types with EFA: the number of cards, and how many of them have an IP address.
#
# Source: Amazon EC2 User Guide, "Maximize network bandwidth with multiple network cards" and "EFA-enabled instance
# types". The first card has the address of the node. Types without an entry have one ordinary card.

locals {
  efa_cards = {
    "p4d.24xlarge"     = { cards = 4, kind = "efa" }
    "p4de.24xlarge"    = { cards = 4, kind = "efa" }
    "p5.48xlarge"      = { cards = 32, kind = "efa-only" }
    "p5e.48xlarge"     = { cards = 32, kind = "efa-only" }
    "p5en.48xlarge"    = { cards = 16, kind = "efa-only" }
    "p6-b200.48xlarge" = { cards = 8, kind = "efa-only" }
    "trn1.32xlarge"    = { cards = 8, kind = "efa" }
    "trn1n.32xlarge"   = { cards = 16, kind = "efa" }
    "trn2.48xlarge"    = { cards = 16, kind = "efa-only" }
  }
  efa = lookup(local.efa_cards, var.instance_type, null)

  # EC2 accepts one card with device index 0, on network card 0. All others have device index 1.
  interfaces = local.efa == null ? [] : [
    for card in range(local.efa.cards) : { card = card, device = card == 0 ? 0 : 1, kind = card == 0 ? "efa" : local.efa.kind }
  ]
}
