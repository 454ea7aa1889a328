/** The Overview counts jobs by status, and each node of a fleet once. */
import { describe, expect, test } from 'vitest'

import { outline } from '../src/charts/Sparkline'
import type { Fleet, Node, TrainingJobSummary } from '../src/contract'
import { capacityOf } from '../src/model/fleets'
import { jobsByStatus } from '../src/model/jobs'

const job = (changes: Partial<TrainingJobSummary>): TrainingJobSummary =>
  ({
    TrainingJobName: 'gpt',
    RunId: 'run',
    FleetName: 'main',
    SecondaryStatus: 'Training',
    Reason: 'trains',
    Boundary: 100,
    CommittedStep: 100,
    ...changes,
  }) as TrainingJobSummary
const fleet = (changes: Partial<Fleet>): Fleet =>
  ({
    FleetName: 'main',
    FleetStatus: 'active',
    Reason: '',
    DesiredNodeCount: 4,
    ConnectedNodeCount: 4,
    MaxNodeCount: 8,
    ...changes,
  }) as Fleet
const node = (id: string, changes: Partial<Node> = {}): Node =>
  ({ NodeId: id, FleetName: 'main', NodeStatus: 'assigned', Reason: '', ...changes }) as Node

test('jobs are counted by status, the most urgent status first', () => {
  const jobs = [job({}), job({}), job({ SecondaryStatus: 'Failed' }), job({ SecondaryStatus: 'Restarting' })]
  expect(jobsByStatus(jobs).map(({ status, word, count }) => [status, word, count])).toEqual([
    ['Failed', 'Failed', 1],
    ['Restarting', 'Recovering', 1],
    ['Training', 'Training', 2],
  ])
})

test('every node of a fleet is counted once, and nodes of other fleets are not', () => {
  const nodes = [
    node('a'),
    node('b', { NodeStatus: 'spare' }),
    node('c', { NodeStatus: 'held' }),
    node('d', { NodeStatus: 'joining' }),
    node('e', { NodeStatus: 'gone' }),
    node('f', { FleetName: 'other' }),
  ]
  expect(capacityOf(fleet({}), nodes)).toEqual({ inUse: 1, spare: 1, held: 1 })
})

describe('a sparkline', () => {
  test('leaves a gap where a value is missing', () =>
    expect(outline([1, 2, null, 2, 1], 102, 12)).toBe('M1.0 11.0L26.0 1.0M76.0 1.0L101.0 11.0'))
  test('draws nothing for fewer than two values', () => expect(outline([1, null], 10, 10)).toBe(''))
  test('draws a constant series as a level line', () => expect(outline([3, 3], 12, 12)).toBe('M1.0 11.0L11.0 11.0'))
})
