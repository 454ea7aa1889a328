/** The list of jobs sorts and filters jobs, saves views, and requests loss curves and renders rows only in view. */
import { describe, expect, test } from 'vitest'

import type { Duty, TrainingJobSummary } from '../src/contract'
import {
  addressesOf,
  arranged,
  columnsOf,
  columnsText,
  DEFAULT_COLUMNS,
  groupCounts,
  groupOf,
  orderOf,
  viewsOf,
  withView,
  type View,
} from '../src/model/jobs'
import { curvesToRequest, MOST_CURVES, withCurves } from '../src/model/lossCurves'
import { rangeInView } from '../src/parts/visibleRows'

const NOW = 1_800_000_000
const ENDED = { TrainingJobStatus: 'Failed', SecondaryStatus: 'Failed' } as const
const job = (TrainingJobName: string, changes: Partial<TrainingJobSummary> = {}): TrainingJobSummary =>
  ({
    TrainingJobName,
    RunId: TrainingJobName,
    FleetName: 'main',
    Reason: `because ${TrainingJobName}`,
    CreationTime: 0,
    TrainingJobStatus: 'InProgress',
    SecondaryStatus: 'Training',
    Boundary: 100,
    NodeCount: 2,
    Priority: 0,
    ...changes,
  }) as TrainingJobSummary

const duty = (Urgency: Duty['Urgency']): Duty => ({ Kind: 'JobFailed', Urgency, Sentence: 'Act.', Actions: [] })

describe('the group of a job', () => {
  test.each([
    ['attention', { Duty: duty('Now') }],
    ['attention', { Duty: duty('Later') }],
    ['training', { Duty: duty('Optional') }],
    ['finished', { ...ENDED, Duty: duty('Optional') }],
    ['recovering', { SecondaryStatus: 'Restarting' }],
    ['recovering', { OpenIncidentCount: 1 }],
    ['queued', { SecondaryStatus: 'Interrupted' }],
    ['queued', { SecondaryStatus: 'Pending' }],
    ['starting', { SecondaryStatus: 'Downloading' }],
    ['paused', { SecondaryStatus: 'Pausing' }],
    ['training', {}],
  ] as const)('is %s for %o', (group, changes) => expect(groupOf(job('a', changes))).toBe(group))
  test('is counted once per job', () => {
    const counts = groupCounts([job('a'), job('b'), job('c', { SecondaryStatus: 'Pending' })])
    expect(Object.entries(counts).filter(([, number]) => number)).toEqual([
      ['queued', 1],
      ['training', 2],
    ])
  })
})

describe('the list of jobs', () => {
  const jobs = [
    job('b', { Boundary: 5, CreationTime: 2, EstimatedRemainingSeconds: 9, IncidentCount: 1 }),
    job('a', { ...ENDED, Duty: duty('Now'), Boundary: 9, CreationTime: 1, NodeCount: 8 }),
    job('c', { TrainingJobStatus: 'Completed', SecondaryStatus: 'Completed', Boundary: 1, CreationTime: 3 }),
  ]
  const all: View = { text: '', status: '', fleet: '', order: 'created', isReversed: false }
  const names = (changes: Partial<View>) =>
    arranged(jobs, { ...all, ...changes })
      .map((each) => each.TrainingJobName)
      .join('')
  test.each([
    [{}, 'cba'],
    [{ isReversed: true }, 'abc'],
    [{ order: 'trouble' }, 'abc'],
    [{ order: 'trouble', isReversed: true }, 'cba'],
    [{ order: 'name' }, 'abc'],
    [{ order: 'step' }, 'abc'],
    [{ order: 'left' }, 'bca'],
    [{ order: 'nodes' }, 'acb'],
    [{ order: 'incidents' }, 'bca'],
    [{ text: 'BECAUSE B' }, 'b'],
    [{ status: 'Failed' }, 'a'],
    [{ fleet: 'other' }, ''],
  ] as const)('%o: %s', (changes, expected) => expect(names(changes)).toBe(expected))
  test('has the order of the address, and trouble first without a valid one', () => {
    expect([orderOf('cost'), orderOf(null), orderOf('nonsense')]).toEqual(['cost', 'trouble', 'trouble'])
  })
})

describe('the address of a job', () => {
  const jobs = [job('gpt', { RunId: '1a' }), job('gpt', { RunId: '2b' }), job('bert', { RunId: '3c' })]
  test('is its name, or its RunId if jobs of two projects have the name', () => {
    expect(jobs.map(addressesOf(jobs))).toEqual(['1a', '2b', 'bert'])
  })
  test('is its name if the RunId is unknown', () => {
    expect(addressesOf(jobs)({ TrainingJobName: 'gpt' })).toBe('gpt')
  })
})

describe('columns', () => {
  test('are eight unless the address names others', () => {
    expect(columnsOf('')).toHaveLength(8)
    expect(columnsOf('nonsense')).toBe(DEFAULT_COLUMNS)
  })
  test('survive the address in the order of the table, always with the name', () => {
    expect(columnsText(['cost', 'name', 'status'])).toBe('name,status,cost')
    expect(columnsOf('cost,status')).toEqual(['name', 'status', 'cost'])
    expect(columnsText(DEFAULT_COLUMNS.toReversed())).toBe('')
  })
})

describe('saved views', () => {
  test('replace a view of the same name', () => {
    const views = withView(withView([], { name: 'mine', search: 'q=a' }), { name: 'other', search: '' })
    expect(withView(views, { name: 'mine', search: 'q=b' })).toEqual([
      { name: 'other', search: '' },
      { name: 'mine', search: 'q=b' },
    ])
  })
  test.each([null, '', '{', '{}', '[1, null, {"name": 5}]'])('of the stored text %j are none', (stored) => {
    expect(viewsOf(stored)).toEqual([])
  })
  test('survive their storage, at most 30', () => {
    const views = Array.from({ length: 40 }, (_, number) => ({ name: `${number}`, search: '' }))
    expect(viewsOf(JSON.stringify(views))).toHaveLength(30)
  })
})

describe('loss curves', () => {
  const held = { a: { values: [2, 1], step: 100, at: NOW } }
  test('are requested for rows without one, and again after 30 seconds if the job made steps', () => {
    const requested = (at: number, step: number) => curvesToRequest([job('a', { Boundary: step }), job('b')], held, at)
    expect(requested(NOW + 29, 101)).toEqual(['b'])
    expect(requested(NOW + 30, 101)).toEqual(['a', 'b'])
    expect(requested(NOW + 999, 100)).toEqual(['b'])
  })
  test('are not requested for jobs without a step, and for at most 50 jobs at once', () => {
    expect(curvesToRequest([job('a', { Boundary: -1 }), job('b', { Boundary: 0 })], {}, NOW)).toEqual([])
    const many = Array.from({ length: 60 }, (_, number) => job(`${number}`))
    expect(curvesToRequest(many, {}, NOW)).toHaveLength(MOST_CURVES)
  })
  test('have a gap for each value that is not finite, and no value for a job without a loss', () => {
    const answer = { RunId: 'b', MetricName: 'loss', Steps: [1, 2], Values: [3, 'NaN' as const] }
    const curves = withCurves(
      held,
      new Map([
        ['b', 7],
        ['c', 8],
      ]),
      [answer],
      NOW,
    )
    expect(curves).toEqual({
      ...held,
      b: { values: [3, null], step: 7, at: NOW },
      c: { values: [], step: 8, at: NOW },
    })
  })
})

describe('the rows in view', () => {
  test('contain every row of the window, for every position of a scroll', () => {
    for (let top = 300; top > -44_100; top -= 37) {
      const { first, end } = rangeInView(top, 900, 44, 1000)
      const firstSeen = Math.max(0, Math.floor(-top / 44))
      const lastSeen = Math.min(999, Math.floor((900 - top) / 44))
      expect(first).toBeLessThanOrEqual(firstSeen)
      expect(end).toBeGreaterThan(Math.min(lastSeen, 999))
      expect(end - first).toBeLessThanOrEqual(60)
    }
  })
  test('are all rows of a short table', () => {
    expect(rangeInView(200, 900, 44, 12)).toEqual({ first: 0, end: 12 })
    expect(rangeInView(200, 900, 44, 0)).toEqual({ first: 0, end: 0 })
  })
})
