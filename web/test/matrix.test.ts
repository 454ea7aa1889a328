/** The protection matrix shows the holders of each shard, the shards with the fewest holders first. */
import { expect, test } from 'vitest'

import type { ShardProtection } from '../src/contract'
import { copies, heldWords, losses, matrix, survivesOneLoss } from '../src/model/matrix'

const shard = (Rank: number, holders: Record<string, boolean>, CommittedStep = 9): ShardProtection => ({
  Rank,
  OwnerNodeId: 'i-a',
  CommittedStep,
  Bytes: 1,
  Reason: '',
  Holders: Object.entries(holders).map(([NodeId, InView]) => ({ NodeId, InView })),
})

test('shards with the fewest holders come first, then those that are behind', () => {
  const { rows, newest } = matrix({
    Copies: 2,
    Shards: [
      shard(0, { 'i-a': true, 'i-b': true }),
      shard(1, { 'i-a': true, 'i-b': true }, 7),
      shard(2, { 'i-a': true, 'i-b': false }),
    ],
  })
  expect(rows.map((row) => [row.shard.Rank, row.held])).toEqual([
    [2, 1],
    [1, 2],
    [0, 2],
  ])
  expect(newest).toBe(9)
})
test('a cell is the owner’s copy, a copy, or not counted; a node without a copy has no cell', () => {
  const { rows, nodes } = matrix({ Copies: 2, Shards: [shard(0, { 'i-a': true, 'i-b': true, 'i-c': false })] })
  expect(nodes).toEqual(['i-a', 'i-b', 'i-c'])
  expect(nodes.map((node) => rows[0]!.cells.get(node))).toEqual(['own', 'copy', 'out'])
  expect(rows[0]!.cells.get('i-d')).toBeUndefined()
})
test('with parity, every node of the group counts', () => {
  const { rows } = matrix({
    Copies: 1,
    ParityGroupSize: 3,
    Shards: [shard(0, { 'i-a': true, 'i-b': true, 'i-c': true }), shard(1, { 'i-a': true, 'i-b': true, 'i-c': false })],
  })
  expect(rows.map((row) => [row.shard.Rank, row.held, row.wanted, row.hasProblem])).toEqual([
    [1, 2, 3, true],
    [0, 3, 3, false],
  ])
})
test('256 shards on 256 nodes are laid out', () => {
  const many = Array.from({ length: 256 }, (_, rank) => ({
    ...shard(rank, { [`i-${rank}`]: true, [`i-${(rank + 1) % 256}`]: true }),
    OwnerNodeId: `i-${rank}`,
  }))
  expect(matrix({ Copies: 2, Shards: many })).toMatchObject({ nodes: { length: 256 }, rows: { length: 256 } })
})
test('no shards give no rows', () =>
  expect(matrix({ Copies: 2, Shards: [] })).toEqual({ nodes: [], rows: [], newest: -1 }))

const lagging = {
  ...shard(0, {}),
  Holders: [
    { NodeId: 'i-a', InView: true, VerifiedStep: 12, LagSteps: 0 },
    { NodeId: 'i-b', InView: true, VerifiedStep: 8, LagSteps: 4 },
    { NodeId: 'i-c', InView: true, VerifiedStep: 9, LagSteps: 3 },
    { NodeId: 'i-d', InView: false, VerifiedStep: 2, LagSteps: 10 },
    { NodeId: 'i-e', InView: true },
  ],
}
test('a holder of an older step is behind; a holder without a step counts as a copy', () =>
  expect([...matrix({ Copies: 2, Shards: [lagging] }).rows[0]!.cells.values()]).toEqual([
    'own',
    'behind',
    'copy',
    'out',
    'copy',
  ]))
test('copies that do not count come first, then those farthest behind', () =>
  expect(copies(matrix({ Copies: 2, Shards: [lagging] }).rows).map((copy) => copy.holder.NodeId)).toEqual([
    'i-d',
    'i-b',
    'i-c',
    'i-a',
    'i-e',
  ]))
test('a shard with too few copies, behind the others or with a reason has a problem, and its copies come first', () => {
  const shards = [
    shard(0, { 'i-a': true, 'i-b': true }),
    shard(1, { 'i-a': true }),
    { ...shard(2, { 'i-a': true, 'i-b': true }), Reason: 'no room' },
    shard(3, { 'i-a': true, 'i-b': true }, 8),
  ]
  const { rows } = matrix({ Copies: 2, Shards: shards })
  expect(rows.filter((row) => row.hasProblem).map((row) => row.shard.Rank)).toEqual([1, 3, 2])
  expect(copies(rows).map((copy) => copy.row.shard.Rank)).toEqual([1, 2, 2, 3, 3, 0, 0])
})
test('a holder in words', () => {
  expect(
    heldWords(
      { NodeId: 'i-b', InView: true, VerifiedStep: 1200, LagSteps: 4, VerifiedTime: 90, FailureDomain: 'nn-1' },
      100,
    ),
  ).toBe('step 1,200, 4 steps behind the ranks, verified 10 s ago, below nn-1')
  expect(heldWords({ NodeId: 'i-b', InView: true }, 100)).toBe('nothing verified yet')
})
test('losses are of nodes, then of whole domains', () =>
  expect(
    losses({ RecoveryOdds: [{ LostNodes: 1, Probability: 1 }], DomainOdds: [{ LostDomains: 2, Probability: 0.5 }] }),
  ).toEqual([
    { lost: '1 node', probability: 1 },
    { lost: '2 failure domains', probability: 0.5 },
  ]))

test('one lost node is survived only if every shard survives it, and unknown while a node is silent', () => {
  const odds = (Probability: number) => ({
    RecoveryOdds: [
      { LostNodes: 2, Probability: 1 },
      { LostNodes: 1, Probability },
    ],
  })
  expect([
    survivesOneLoss(odds(1), 'Protected'),
    survivesOneLoss(odds(1), 'Degraded'),
    survivesOneLoss(odds(0.9), 'Protected'),
  ]).toEqual([true, true, false])
  expect([
    survivesOneLoss(odds(1), 'Unconfirmed'),
    survivesOneLoss(odds(1), 'Released'),
    survivesOneLoss({}, 'Protected'),
  ]).toEqual([undefined, undefined, undefined])
})
