/** Which node holds which shard. Shards with the fewest holders come first. Pure. */
import type { DescribeProtectionResponse, Holder, ShardProtection } from '../contract'
import { MATRIX } from '../words/jobTabs'
import type { ProtectionWord } from './figures'
import { ago, count, plural } from './format'

/**
 * What a node holds of a shard. A copy counts if its node is in the view, so that commits wait for it.
 *
 * - own: the copy on the owner's node; it counts.
 * - copy: a copy of the committed step on another node; it counts.
 * - behind: a copy of an older step; it counts.
 * - out: a copy that does not count.
 */
export type Cell = 'own' | 'copy' | 'behind' | 'out'

export interface Row {
  shard: ShardProtection
  /** Number of holders whose copy counts. */
  held: number
  /** Number of holders whose copy should count: Copies, or with parity all nodes of the parity group. */
  wanted: number
  /** Whether the shard has fewer holders than wanted, is behind the newest committed step, or reports a problem. */
  hasProblem: boolean
  cells: Map<string, Cell>
}

const cellOf = (shard: ShardProtection, holder: Holder): Cell => {
  if (!holder.InView) return 'out'
  if (holder.VerifiedStep !== undefined && holder.VerifiedStep < shard.CommittedStep) return 'behind'
  return holder.NodeId === shard.OwnerNodeId ? 'own' : 'copy'
}

type Protection = Pick<DescribeProtectionResponse, 'Shards' | 'Copies' | 'ParityGroupSize'>

/** Return the columns, the rows, and the newest committed step of all shards, or -1. */
export function matrix(protection: Protection): { nodes: string[]; rows: Row[]; newest: number } {
  const shards = protection.Shards ?? []
  const newest = shards.reduce((most, shard) => Math.max(most, shard.CommittedStep), -1)
  const rows = shards
    .map((shard) => {
      const holders = shard.Holders ?? []
      const held = holders.filter((holder) => holder.InView).length
      const wanted = protection.ParityGroupSize === undefined ? protection.Copies : holders.length
      return {
        shard,
        held,
        wanted,
        hasProblem: held < wanted || Boolean(shard.Reason) || shard.CommittedStep < newest,
        cells: new Map(holders.map((holder) => [holder.NodeId, cellOf(shard, holder)] as const)),
      }
    })
    .sort((a, b) => a.held - b.held || a.shard.CommittedStep - b.shard.CommittedStep || a.shard.Rank - b.shard.Rank)
  const byRank = shards.toSorted((a, b) => a.Rank - b.Rank)
  const nodesOf = ({ OwnerNodeId, Holders = [] }: ShardProtection) => [
    OwnerNodeId,
    ...Holders.map((holder) => holder.NodeId),
  ]
  const nodes = new Set(byRank.flatMap(nodesOf))
  return { nodes: [...nodes], rows, newest }
}

/** One copy of one shard. */
export interface Copy {
  row: Row
  cell: Cell
  holder: Holder
}

const WORST: Cell[] = ['out', 'behind', 'own', 'copy']

/** Return every copy: copies that do not count first, then those of shards with a problem, then by lag. */
export function copies(rows: readonly Row[]): Copy[] {
  const all = rows.flatMap((row) =>
    (row.shard.Holders ?? []).map((holder) => ({ row, cell: row.cells.get(holder.NodeId)!, holder })),
  )
  const badness = (copy: Copy) => Math.min(2, WORST.indexOf(copy.cell))
  return all.sort(
    (a, b) =>
      badness(a) - badness(b) ||
      Number(b.row.hasProblem) - Number(a.row.hasProblem) ||
      (b.holder.LagSteps ?? 0) - (a.holder.LagSteps ?? 0) ||
      a.row.shard.Rank - b.row.shard.Rank,
  )
}

/** Return what a holder has, in words. */
export function heldWords(holder: Holder, now: number): string {
  const domain = holder.FailureDomain ? MATRIX.below(holder.FailureDomain) : ''
  if (holder.VerifiedStep === undefined) return `${MATRIX.unverified}${domain}`
  const lag = holder.LagSteps ? MATRIX.lag(plural(holder.LagSteps, 'step')) : ''
  const at = holder.VerifiedTime === undefined ? '' : MATRIX.verified(ago(Math.min(holder.VerifiedTime, now), now))
  return `${MATRIX.held(count(holder.VerifiedStep))}${lag}${at}${domain}`
}

/** Return the probability that every shard survives each loss: first of nodes, then of failure domains. */
export function losses({ RecoveryOdds = [], DomainOdds = [] }: Partial<DescribeProtectionResponse>) {
  return [
    ...RecoveryOdds.map((odds) => ({ lost: plural(odds.LostNodes, 'node'), probability: odds.Probability })),
    ...DomainOdds.map((odds) => ({ lost: plural(odds.LostDomains, 'failure domain'), probability: odds.Probability })),
  ]
}

/**
 * Return whether every shard survives the loss of any one node.
 *
 * undefined: the odds are unknown, or a node is silent, so that the reported holders may be out of date.
 */
export function survivesOneLoss(
  { RecoveryOdds = [] }: Partial<DescribeProtectionResponse>,
  state: ProtectionWord,
): boolean | undefined {
  if (state !== 'Protected' && state !== 'Degraded') return undefined
  const odds = RecoveryOdds.find((each) => each.LostNodes === 1)
  return odds && odds.Probability >= 1
}
