/** Who holds what. */
import { expect, test } from 'vitest'

import type { ShardProtection } from '../src/contract'
import { matrix } from '../src/model/matrix'

const shard = (Rank: number, holders: Record<string, boolean>, CommittedStep = 9): ShardProtection => ({ Rank, OwnerNodeId: 'i-a', CommittedStep, Bytes: 1, Reason: '', Holders: Object.entries(holders).map(([NodeId, InView]) => ({ NodeId, InView })) })

test('the thinnest come first, then those that are behind', () => {
  const { rows, newest } = matrix({ Shards: [shard(0, { 'i-a': true, 'i-b': true }), shard(1, { 'i-a': true, 'i-b': true }, 7), shard(2, { 'i-a': true, 'i-b': false })] })
  expect(rows.map((row) => [row.shard.Rank, row.held])).toEqual([[2, 1], [1, 2], [0, 2]])
  expect(newest).toBe(9)
})
test('a cell is the owner’s own, a copy, or out of view; who holds nothing has none', () => {
  const { rows, nodes } = matrix({ Shards: [shard(0, { 'i-a': true, 'i-b': true, 'i-c': false })] })
  expect(nodes).toEqual(['i-a', 'i-b', 'i-c'])
  expect(nodes.map((node) => rows[0]!.cells.get(node))).toEqual(['own', 'copy', 'out'])
  expect(rows[0]!.cells.get('i-d')).toBeUndefined()
})
test('256 shards on 256 nodes are laid out', () => {
  const many = Array.from({ length: 256 }, (_, rank) => ({ ...shard(rank, { [`i-${rank}`]: true, [`i-${(rank + 1) % 256}`]: true }), OwnerNodeId: `i-${rank}` }))
  expect(matrix({ Shards: many })).toMatchObject({ nodes: { length: 256 }, rows: { length: 256 } })
})
test('nothing is nothing', () => expect(matrix({ Shards: [] })).toEqual({ nodes: [], rows: [], newest: -1 }))
