/** Metrics become lines over steps, time or tokens, with failures, gaps, and finer points for a zoomed axis. */
import { describe, expect, test } from 'vitest'

import type { Incident, MetricDataResult, SecondaryStatusTransition } from '../src/contract'
import type { Logged } from '../src/model/changes'
import {
  csv,
  detailed,
  faultsOn,
  isCoarse,
  lowerBound,
  series,
  standstills,
  startOf,
  tokensAt,
  tokensMetric,
} from '../src/model/metrics'
import { extremes, groups, titleOf, unitOf, UNPREFIXED } from '../src/model/ownMetrics'

type Value = MetricDataResult['Means'][number]
/** A point: first step, last step, time, mean, minimum, maximum. */
type Row = [number, number, number, Value, Value?, Value?]

function metric(name: string, rows: Row[], lowOn: string[] = [], highOn: string[] = []): MetricDataResult {
  const column = <T>(of: (row: Row) => T) => rows.map(of)
  return {
    MetricName: name,
    Steps: column((row) => row[0]),
    LastSteps: column((row) => row[1]),
    Times: column((row) => row[2]),
    Counts: column(() => 1),
    Means: column((row) => row[3]),
    Minimums: column((row) => row[4] ?? row[3]),
    Maximums: column((row) => row[5] ?? row[3]),
    LastValues: column((row) => row[3]),
    MinimumNodeIds: lowOn,
    MaximumNodeIds: highOn,
  }
}
const logged = (...metrics: MetricDataResult[]): Logged => new Map(metrics.map((each) => [each.MetricName, each]))

const loss = metric('loss', [
  [1, 1, 100, 3, 2, 4],
  [2, 2, 150, 2.5],
  [3, 3, 160, 'NaN'],
])
const incident = {
  IncidentId: 'i1',
  Cause: 'node_fault',
  FailedAt: 115,
  ClosedAt: 150,
  FromStep: 1,
  ReachedStep: 2,
} as Incident

describe('a line', () => {
  test('over steps has a gap where a value is not finite', () =>
    expect(series(loss, { axis: 'step' })).toMatchObject({
      x: [1, 2, 3],
      y: [3, 2.5, null],
      low: [2, 2.5, null],
      high: [4, 2.5, null],
    }))
  test('over time has a gap from each standstill to the next point', () =>
    expect(series(loss, { axis: 'wall', gaps: [155, 115] })).toMatchObject({
      x: [100, 115, 150, 155, 160],
      y: [3, null, 2.5, null, null],
    }))
  test('has a gap between two points if training stopped at the time of the first one', () =>
    expect(series(loss, { axis: 'wall', gaps: [100] })).toMatchObject({
      x: [100, 125, 150, 160],
      y: [3, null, 2.5, null],
    }))
  test('has no gap before its first or after its last point', () =>
    expect(series(loss, { axis: 'wall', gaps: [50, 170] }).x).toEqual([100, 150, 160]))
  test('over time has a gap where points are missing for much longer than usual', () => {
    const rows: Row[] = [0, 5, 10, 15, 400, 405].map((at, step) => [step, step, at, 1])
    expect(series(metric('loss', rows), { axis: 'wall' })).toMatchObject({
      x: [0, 5, 10, 15, 20, 400, 405],
      y: [1, 1, 1, 1, null, 1, 1],
    })
    expect(series(metric('loss', rows), { axis: 'step' }).y).toEqual(Array(6).fill(1))
  })
  test('over elapsed time starts at zero, with the same gaps', () =>
    expect(series(loss, { axis: 'elapsed', gaps: [115], startedAt: 100 }).x).toEqual([0, 15, 50, 60]))
  test('over tokens is interpolated between the steps at which tokens are logged', () => {
    const tokens = tokensAt(
      metric('tokens', [
        [1, 1, 0, 1000],
        [3, 3, 0, 3000],
      ]),
    )
    expect(series(loss, { axis: 'tokens', tokens })).toMatchObject({ x: [1000, 2000, 3000], y: [3, 2.5, null] })
    expect([tokens(0), tokens(4), tokensAt(undefined)(1)]).toEqual([null, null, null])
  })
  test('over tokens omits points at which the counter falls', () => {
    const falling = tokensAt(
      metric('tokens', [
        [1, 1, 0, 1000],
        [2, 2, 0, 10],
        [3, 3, 0, 3000],
      ]),
    )
    expect(series(loss, { axis: 'tokens', tokens: falling }).x).toEqual([1000, 3000])
  })
  test('names the nodes with the extremes', () =>
    expect(
      series({ ...loss, MinimumNodeIds: ['', 'i-a', 'i-b'], MaximumNodeIds: ['i-c', '', ''] }, { axis: 'step' }),
    ).toMatchObject({
      lowOn: [undefined, 'i-a', 'i-b'],
      highOn: ['i-c', undefined, undefined],
    }))
})

test('the metric that counts tokens is found by its name', () => {
  expect(tokensMetric(['loss', 'train/tokens_seen'])).toBe('train/tokens_seen')
  expect(tokensMetric(['tokens_per_second', 'tokenizer'])).toBeUndefined()
})
test('the start is the time of the first value of any metric', () =>
  expect(startOf(logged(loss, metric('lr', [[1, 1, 90, 1]]), metric('none', [])))).toBe(90))
test.each([
  [0, 0],
  [1, 0],
  [2, 1],
  [3, 1],
  [9, 3],
])('the first place at or after %i is %i', (wanted, place) => expect(lowerBound([1, 3, 5], wanted)).toBe(place))

describe('failures', () => {
  const on = (change: Partial<Incident>, axis: 'step' | 'wall' | 'elapsed' | 'tokens') =>
    faultsOn([{ ...incident, ...change } as Incident], axis, 170, 100)
  test('span the repeated steps', () =>
    expect(on({}, 'step')).toEqual([{ number: 1, incidentId: 'i1', cause: 'node_fault', from: 1, to: 2 }]))
  test('without repeated steps are at the step that training had reached', () =>
    expect(on({ FromStep: undefined }, 'step')[0]).toMatchObject({ from: 2, to: 2 }))
  test('at an unknown step are not drawn', () =>
    expect(on({ FromStep: undefined, ReachedStep: undefined }, 'step')).toEqual([]))
  test('that are open last until now', () =>
    expect(on({ ClosedAt: undefined }, 'wall')[0]).toMatchObject({ from: 115, to: 170 }))
  test('are shifted on an axis of elapsed time, and absent on one of tokens', () => {
    expect(on({}, 'elapsed')[0]).toMatchObject({ from: 15, to: 50 })
    expect(on({}, 'tokens')).toEqual([])
  })
})

test('training stands still when a running job leaves the state running', () => {
  const span = (State: SecondaryStatusTransition['State'], StartTime: number): SecondaryStatusTransition => ({
    Status: 'Training',
    State,
    StartTime,
    StatusMessage: '',
  })
  expect(
    standstills([
      span('queued', 80),
      span('running', 95),
      span('pausing', 155),
      span('queued', 156),
      span('running', 158),
    ]),
  ).toEqual([155])
  expect(standstills(undefined)).toEqual([])
})

describe('a long run', () => {
  const coarse = metric('loss', [
    [1, 8, 80, 3],
    [9, 16, 160, 2],
    [17, 24, 240, 1],
    [25, 25, 250, 0],
  ])
  test.each([
    ['step', 10, 12, true],
    ['step', 25, 99, false],
    ['step', 24.5, 24.9, false],
    ['wall', 100, 170, true],
    ['wall', 90, 150, false],
    ['wall', 245, 260, false],
  ] as const)('over %s from %d to %d has finer points: %s', (axis, from, to, expected) =>
    expect(isCoarse(logged(coarse), { axis, from, to })).toBe(expected),
  )
  test('shows finer points in place of the points of the same steps', () => {
    const fine = metric('loss', [
      [12, 12, 120, 2.2],
      [13, 13, 130, 2.1],
    ])
    const found = detailed(logged(coarse), logged(fine)).get('loss')!
    expect([found.Steps, found.LastSteps, found.Means]).toEqual([
      [1, 12, 13, 17, 25],
      [8, 12, 13, 24, 25],
      [3, 2.2, 2.1, 1, 0],
    ])
    expect(detailed(logged(coarse), new Map()).get('loss')).toBe(coarse)
  })
})

test('CSV has one row per step', () => {
  const [head, ...rows] = csv(logged(loss, metric('lr', [[2, 2, 150, 0.1]]), metric('=a,"b"', [[4, 4, 170, 1]]))).split(
    '\n',
  )
  expect(head).toBe(`step,time,"'=a,""b""",loss,lr`)
  expect(rows).toEqual([
    '1,1970-01-01T00:01:40.000Z,,3,',
    '2,1970-01-01T00:02:30.000Z,,2.5,0.1',
    '3,1970-01-01T00:02:40.000Z,,NaN,',
    '4,1970-01-01T00:02:50.000Z,1,,',
    '',
  ])
})

describe('names', () => {
  test('are grouped by prefix, then metrics of Everstep by subject', () => {
    const names = [
      'train/loss',
      'everstep/gpu_percent',
      'loss',
      'eval/loss',
      'everstep/new',
      'everstep/step_seconds',
      'train/lr',
    ]
    expect(groups(names)).toEqual([
      { title: UNPREFIXED, names: ['loss'] },
      { title: 'train', names: ['train/loss', 'train/lr'] },
      { title: 'eval', names: ['eval/loss'] },
      { title: 'Steps and protection', names: ['everstep/step_seconds'] },
      { title: 'Nodes', names: ['everstep/gpu_percent', 'everstep/new'] },
    ])
  })
  test('without a title stay as they are', () =>
    expect([titleOf('everstep/step_seconds'), titleOf('everstep/x')]).toEqual(['Time per step', 'everstep/x']))
  test.each([
    ['step_seconds', 'seconds'],
    ['gpu_percent', 'percent'],
    ['a_bytes', 'bytes'],
    ['a_bytes_per_second', 'bytes/s'],
    ['loss', 'number'],
  ])('%s counts %s', (name, unit) => expect(unitOf(name)).toBe(unit))
})

test('the extreme nodes are those at the newest point that names nodes', () => {
  const rows: Row[] = [
    [2, 2, 1, 90, 12, 97],
    [3, 3, 2, 5],
  ]
  const of = (lowOn: string[], highOn: string[]) => series(metric('gpu', rows, lowOn, highOn), { axis: 'step' })
  expect(extremes(of(['i-a', ''], ['i-b', '']))).toEqual({ least: 'i-a', most: 'i-b' })
  expect(extremes(of(['', ''], ['', '']))).toBeUndefined()
})
