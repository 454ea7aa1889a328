/** Shards against nodes: who holds what, the thinnest protected first. Pure. */
import type { DescribeProtectionResponse, ShardProtection } from '../contract'

export type Cell = 'own' | 'copy' | 'out'
export interface Row {
  shard: ShardProtection
  /** Holders that count. */
  held: number
  cells: Map<string, Cell>
}

export function matrix(protection: Pick<DescribeProtectionResponse, 'Shards'>): { nodes: string[]; rows: Row[]; newest: number } {
  const shards = protection.Shards ?? []
  const rows = shards
    .map((shard) => ({
      shard,
      held: (shard.Holders ?? []).filter((holder) => holder.InView).length,
      cells: new Map((shard.Holders ?? []).map((holder) => [holder.NodeId, !holder.InView ? 'out' : holder.NodeId === shard.OwnerNodeId ? 'own' : 'copy'] as const)),
    }))
    .sort((a, b) => a.held - b.held || a.shard.CommittedStep - b.shard.CommittedStep || a.shard.Rank - b.shard.Rank)
  const nodes = [...new Set(shards.toSorted((a, b) => a.Rank - b.Rank).flatMap((shard) => [shard.OwnerNodeId, ...(shard.Holders ?? []).map((holder) => holder.NodeId)]))]
  return { nodes, rows, newest: shards.reduce((most, shard) => Math.max(most, shard.CommittedStep), -1) }
}
