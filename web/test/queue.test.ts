/** The queue contains the jobs that wait for nodes, and names what would start each of them. */
import { expect, test } from 'vitest'

import type { Fleet, TrainingJob, TrainingJobSummary } from '../src/contract'
import { waysOutOfQueue, queueOf, waiting } from '../src/model/queue'

const line = (TrainingJobName: string, NodeCount: number, changes: Partial<TrainingJobSummary> = {}) =>
  ({
    TrainingJobName,
    RunId: TrainingJobName,
    FleetName: 'main',
    SecondaryStatus: 'Training',
    NodeCount,
    Priority: 0,
    CreationTime: 0,
    TrainingStartTime: 1,
    ...changes,
  }) as TrainingJobSummary
const job = (changes: Partial<TrainingJob> = {}) =>
  ({
    RunId: 'me',
    FleetName: 'main',
    NodeCount: 4,
    Priority: 0,
    QueuedBehind: [],
    ...changes,
  }) as unknown as TrainingJob
const fleet = (MaxNodeCount: number): Fleet =>
  ({ MaxNodeCount, FleetStatus: 'active', AutoScalingGroupName: 'group' }) as Fleet

test('the queue is by priority, then by age, and contains only waiting jobs', () => {
  const pending = { SecondaryStatus: 'Pending' } as const
  const jobs = [
    line('young', 1, { ...pending, CreationTime: 9 }),
    line('runs', 1),
    line('old', 1, { ...pending, CreationTime: 1 }),
    line('high', 1, { ...pending, CreationTime: 10, Priority: 5 }),
  ]
  expect(queueOf(jobs).map((each) => each.TrainingJobName)).toEqual(['high', 'old', 'young'])
})
test('a job that is larger than the group gets only this sentence', () =>
  expect(waysOutOfQueue(job({ NodeCount: 9 }), [line('a', 2)], fleet(8))).toEqual([
    expect.stringMatching(/^A larger group: group has at most 8 nodes, and the job needs 9/),
  ]))
test('as many jobs are named as hold enough nodes, of the lowest priority first', () => {
  const jobs = [
    line('big', 8, { Priority: 3 }),
    line('a', 2),
    line('b', 3),
    line('c', 1),
    line('elsewhere', 9, { FleetName: 'other' }),
    line('over', 9, { TrainingEndTime: 2 }),
  ]
  expect(waysOutOfQueue(job(), jobs, fleet(100))).toEqual([
    'The end of b (3 nodes), a (2 nodes), or of other jobs with as many nodes.',
  ])
  expect(waysOutOfQueue(job(), jobs, fleet(16))).toEqual(
    expect.arrayContaining([expect.stringMatching(/^A larger group: .* jobs use 14 of them/)]),
  )
})
test('of interrupted jobs those wait that have a place, in the order of their places', () => {
  const described = [
    job({ SecondaryStatus: 'Interrupted', QueuePosition: 2, TrainingJobName: 'second' }),
    job({ SecondaryStatus: 'Pending', QueuePosition: 1, TrainingJobName: 'first' }),
    job({ SecondaryStatus: 'Interrupted', TrainingJobName: 'gives way' }),
  ]
  expect(waiting(described).map((each) => each.TrainingJobName)).toEqual(['first', 'second'])
  expect(
    queueOf([line('a', 1, { SecondaryStatus: 'Interrupted' }), line('b', 1, { SecondaryStatus: 'Paused' })]).map(
      (each) => each.TrainingJobName,
    ),
  ).toEqual(['a'])
})
test('a job without nodes is not named', () => {
  const jobs = [
    line('paused', 8, { SecondaryStatus: 'Paused' }),
    line('queued', 8, { SecondaryStatus: 'Interrupted' }),
    line('gives-way', 8, { SecondaryStatus: 'Interrupted' }),
  ]
  expect(waysOutOfQueue(job(), jobs, fleet(100), new Set(['queued']))).toEqual([
    expect.stringMatching(/^The end of gives-way \(8 nodes\), or/),
  ])
})
test('the jobs ahead come first', () =>
  expect(waysOutOfQueue(job({ QueuedBehind: ['a'] }), [], fleet(9))[0]).toBe('The start of a.'))
