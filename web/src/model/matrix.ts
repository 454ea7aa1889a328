/** Shards against nodes: who holds what, the thinnest protected first. Pure. */
import type { DescribeProtectionResponse, Holder, ShardProtection } from '../contract'
import { ago, count, plural } from './format'

/** own: the owner's. copy: has what is committed. behind: in view, and lacks it. out: does not count. */
export type Cell = 'own' | 'copy' | 'behind' | 'out'
export interface Row {
  shard: ShardProtection
  /** Holders that count. */
  held: number
  /** Holders that should count: Copies, or with parity all nodes of the group. */
  wanted: number
  /** The shard has fewer holders than wanted, is behind the newest committed step, or reports a problem. */
  needsLook: boolean
  cells: Map<string, Cell>
}

const cellOf = (shard: ShardProtection, holder: Holder): Cell => {
  if (!holder.InView) return 'out'
  if (holder.VerifiedStep !== undefined && holder.VerifiedStep < shard.CommittedStep) return 'behind'
  return holder.NodeId === shard.OwnerNodeId ? 'own' : 'copy'
}

export function matrix(protection: Pick<DescribeProtectionResponse, 'Shards' | 'Copies' | 'ParityGroupSize'>): { nodes: string[]; rows: Row[]; newest: number } {
  const shards = protection.Shards ?? []
  const newest = shards.reduce((most, shard) => Math.max(most, shard.CommittedStep), -1)
  const rows = shards
    .map((shard) => {
      const held = (shard.Holders ?? []).filter((holder) => holder.InView).length
      const wanted = protection.ParityGroupSize === undefined ? protection.Copies : (shard.Holders ?? []).length
      return {
        shard,
        held,
        wanted,
        needsLook: held < wanted || Boolean(shard.Reason) || shard.CommittedStep < newest,
        cells: new Map((shard.Holders ?? []).map((holder) => [holder.NodeId, cellOf(shard, holder)] as const)),
      }
    })
    .sort((a, b) => a.held - b.held || a.shard.CommittedStep - b.shard.CommittedStep || a.shard.Rank - b.shard.Rank)
  const nodes = [...new Set(shards.toSorted((a, b) => a.Rank - b.Rank).flatMap((shard) => [shard.OwnerNodeId, ...(shard.Holders ?? []).map((holder) => holder.NodeId)]))]
  return { nodes, rows, newest }
}

/** One copy of one shard. */
export interface Copy {
  row: Row
  cell: Cell
  holder: Holder
}

const WORST: Cell[] = ['out', 'behind', 'own', 'copy']

/** Every copy: those that do not count first, then those of shards that need a look, then those that are farthest behind. */
export function copies(rows: readonly Row[]): Copy[] {
  const found = rows.flatMap((row) => (row.shard.Holders ?? []).map((holder) => ({ row, cell: row.cells.get(holder.NodeId)!, holder })))
  const bad = (copy: Copy) => Math.min(2, WORST.indexOf(copy.cell))
  return found.sort((a, b) => bad(a) - bad(b) || Number(b.row.needsLook) - Number(a.row.needsLook) || (b.holder.LagSteps ?? 0) - (a.holder.LagSteps ?? 0) || a.row.shard.Rank - b.row.shard.Rank)
}

/** What a holder has, in words. */
export function heldWords(holder: Holder, now: number): string {
  const domain = holder.FailureDomain ? `, below ${holder.FailureDomain}` : ''
  if (holder.VerifiedStep === undefined) return `nothing verified yet${domain}`
  const lag = holder.LagSteps ? `, ${plural(holder.LagSteps, 'step')} behind the ranks` : ''
  const at = holder.VerifiedTime === undefined ? '' : `, verified ${ago(Math.min(holder.VerifiedTime, now), now)}`
  return `step ${count(holder.VerifiedStep)}${lag}${at}${domain}`
}

/** What may be lost at once, and how probable it is that every shard survives: nodes, then whole domains. */
export function losses(protection: Pick<DescribeProtectionResponse, 'RecoveryOdds' | 'DomainOdds'>): { lost: string; probability: number }[] {
  return [
    ...(protection.RecoveryOdds ?? []).map((odds) => ({ lost: plural(odds.LostNodes, 'node'), probability: odds.Probability })),
    ...(protection.DomainOdds ?? []).map((odds) => ({ lost: plural(odds.LostDomains, 'failure domain'), probability: odds.Probability })),
  ]
}
