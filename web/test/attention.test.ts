/** The Overview lists what needs a person, counts jobs by status, and counts each node of a fleet once. */
import { describe, expect, test } from 'vitest'

import { outline } from '../src/charts/Sparkline'
import type { Fleet, HoldAdvice, Node, TrainingJobSummary } from '../src/contract'
import { attention, capacityOf, jobsByStatus } from '../src/model/attention'
import { FAILED_SECONDS } from '../src/model/jobs'

const NOW = 1_780_000_000
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

describe('what needs a person', () => {
  test('is nothing while jobs train, nodes work and fleets are active', () => {
    expect(attention([job({ ProtectionState: 'Protected' })], [fleet({})], [node('i-1')], NOW)).toEqual([])
  })
  test('is a job that failed within a day, with its reason and a link', () => {
    const failed = job({
      TrainingJobStatus: 'Failed',
      SecondaryStatus: 'Failed',
      TrainingEndTime: NOW - FAILED_SECONDS + 1,
      Reason: 'rank 3 exited',
    })
    expect(attention([failed], [], [], NOW)).toMatchObject([
      { tone: 'bad', title: 'gpt', to: '/jobs/gpt', at: failed.TrainingEndTime },
    ])
    expect(attention([failed], [], [], NOW)[0]!.text).toContain('Rank 3 exited.')
    expect(attention([{ ...failed, TrainingEndTime: NOW - FAILED_SECONDS }], [], [], NOW)).toEqual([])
  })
  test('is a job that trains without a step in memory, but not during its first steps', () => {
    expect(attention([job({ ProtectionState: 'Unprotected' })], [], [], NOW)).toHaveLength(1)
    expect(attention([job({ ProtectionState: 'Unprotected', Boundary: 3 })], [], [], NOW)).toEqual([])
  })
  test('is a frozen fleet and a node that a person must release, but not a node that is only silent', () => {
    const nodes = [
      node('i-2', {
        NodeStatus: 'held',
        Hold: 'inspection',
        HoldAdvice: { Description: 'Inspect node i-2.' } as HoldAdvice,
      }),
      node('i-3', { NodeStatus: 'held', Hold: 'unreachable' }),
    ]
    expect(attention([], [fleet({ FleetStatus: 'frozen' })], nodes, NOW).map((item) => item.title)).toEqual([
      'main',
      'i-2',
    ])
  })
  test('begins with failures, the newest first', () => {
    const failures = [1, 2].map((number) =>
      job({
        TrainingJobName: `job-${number}`,
        RunId: `${number}`,
        TrainingJobStatus: 'Failed',
        SecondaryStatus: 'Failed',
        TrainingEndTime: NOW - 100 + number,
      }),
    )
    const items = attention(failures, [fleet({ FleetStatus: 'frozen' })], [], NOW)
    expect(items.map((item) => item.title)).toEqual(['job-2', 'job-1', 'main'])
  })
})

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
  expect(capacityOf(fleet({}), nodes)).toEqual({ inUse: 1, spare: 1, held: 1, other: 1 })
})

describe('a sparkline', () => {
  test('leaves a gap where a value is missing', () =>
    expect(outline([1, 2, null, 2, 1], 102, 12)).toBe('M1.0 11.0L26.0 1.0M76.0 1.0L101.0 11.0'))
  test('draws nothing for fewer than two values', () => expect(outline([1, null], 10, 10)).toBe(''))
  test('draws a constant series as a level line', () => expect(outline([3, 3], 12, 12)).toBe('M1.0 11.0L11.0 11.0'))
})
