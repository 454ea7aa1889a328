import { describe, expect, test } from 'vitest'

import type { OutputEntry, Report, ReportFigures, ReportIncidents } from '../src/contract'
import { byGeneration, shellWord } from '../src/model/outputs'
import {
  axisOf,
  barsOf,
  bucketWords,
  busyBuckets,
  costParts,
  csvOf,
  CSV_KINDS,
  hours,
  isEmpty,
  isHourly,
  money,
  moneyTick,
  ratio,
  ratioTick,
  recomputedSteps,
  span,
  spanOf,
  startOfDay,
  timeAxisOf,
  timeTick,
} from '../src/model/reports'

const NOW = Date.parse('2026-03-01T12:30:00Z') / 1000
const DAY = 86400

const incidents = (changes: Partial<ReportIncidents> = {}): ReportIncidents => ({
  Count: 0,
  RecoveredCount: 0,
  RecoverySeconds: 0,
  RecomputedSteps: 0,
  ...changes,
})
const figures = (changes: Partial<ReportFigures> = {}): ReportFigures => ({
  AccountingSeconds: {},
  ProductiveSeconds: 0,
  NodeSeconds: 0,
  RankSeconds: 0,
  UnpricedNodeSeconds: 0,
  Failures: incidents(),
  PlannedStops: incidents(),
  Drills: incidents(),
  IdleNodeSeconds: {},
  ...changes,
})
const report = (changes: Partial<Report> = {}): Report => ({
  StartTime: NOW - DAY,
  EndTime: NOW,
  Total: figures(),
  Buckets: [],
  Projects: [],
  Fleets: [],
  Jobs: [],
  JobCount: 0,
  Causes: [],
  ...changes,
})

describe('the time range of an address', () => {
  const of = (text: string) => spanOf(new URLSearchParams(text), NOW)
  test('is 7 days up to now by default', () => {
    expect(of('')).toEqual({ range: '7d', start: NOW - 7 * DAY })
    expect(of('range=1y')).toEqual({ range: '7d', start: NOW - 7 * DAY })
    expect(of('range=24h')).toEqual({ range: '24h', start: NOW - DAY })
    expect(of('range=90d')).toEqual({ range: '90d', start: NOW - 90 * DAY })
  })
  test('includes the last day of a custom range', () => {
    const start = Date.parse('2026-02-01T00:00:00Z') / 1000
    expect(of('range=custom&from=2026-02-01&to=2026-02-01')).toEqual({ range: 'custom', start, end: start + DAY })
  })
  test.each(['from=2026-02-02&to=2026-02-01', 'from=2026-02-31&to=x', 'from=2026-2-1&to=2026-03-01', ''])(
    'with invalid days (%s) is the default',
    (days) => {
      expect(of(`range=custom&${days}`)).toEqual({ range: '7d', start: NOW - 7 * DAY })
    },
  )
  test('of today begins at 00:00 UTC and is never empty', () => {
    expect(startOfDay(NOW)).toBe(Date.parse('2026-03-01T00:00:00Z') / 1000)
    expect(startOfDay(startOfDay(NOW))).toBeLessThan(startOfDay(NOW))
  })
})

describe('figures of a report', () => {
  test.each([
    [undefined, '–'],
    [0, '$0.00'],
    [0.004, '< $0.01'],
    [12.345, '$12.35'],
    [12345.6, '$12,346'],
  ])('%s dollars are %s', (usd, text) => expect(money(usd)).toBe(text))
  test.each([
    [undefined, '–'],
    [0, '0.0 %'],
    [0.9334, '93.3 %'],
    [0.99999, '99.9 %'],
    [1, '100 %'],
  ])('the ratio %s is %s', (value, text) => expect(ratio(value)).toBe(text))
  test.each([
    [0, '0'],
    [5400, '1.5'],
    [3600 * 12345.6, '12,346'],
  ])('%s s are %s hours', (seconds, text) => expect(hours(seconds)).toBe(text))
  test('an absent time is a dash', () => expect([span(), span(90)]).toEqual(['–', '1 min 30 s']))
  test('drills do not count as recomputed steps', () => {
    const steps = (count: number) => incidents({ RecomputedSteps: count })
    expect(recomputedSteps(figures({ Failures: steps(1), PlannedStops: steps(2), Drills: steps(4) }))).toBe(3)
  })
  test('a report without jobs is empty unless nodes are idle', () => {
    expect(isEmpty(report())).toBe(true)
    expect(isEmpty(report({ JobCount: 1 }))).toBe(false)
    expect(isEmpty(report({ Total: figures({ IdleNodeSeconds: { spare: 1 } }) }))).toBe(false)
  })
})

describe('trends', () => {
  const bucket = (changes: Partial<ReportFigures>) => ({
    StartTime: NOW,
    EndTime: NOW + DAY,
    Figures: figures(changes),
  })
  test('a bucket without a value has no bar', () => {
    const bars = barsOf(report({ Buckets: [bucket({ EttrRatio: 0.5 }), bucket({})] }), (each) => [each.EttrRatio])
    expect(bars.map((bar) => bar.parts)).toEqual([[0.5], []])
  })
  test('the parts of a cost add up to the cost of jobs and idle nodes', () => {
    const priced = { CostUsd: 10, Failures: incidents({ CostUsd: 2 }), SpareCostUsd: 3, OtherIdleCostUsd: 1 }
    const more = { CostUsd: 1, Failures: incidents({ CostUsd: 2 }) }
    const Buckets = [bucket(priced), bucket({}), bucket({ SpareCostUsd: 3 }), bucket(more)]
    const bars = barsOf(report({ Buckets }), costParts)
    expect(bars.map((bar) => bar.parts)).toEqual([[8, 2, 4], [], [0, 0, 3], [0, 1, 0]])
  })
  test.each([
    [0, 1],
    [0.7, 1],
    [1, 1],
    [1.1, 2],
    [34, 50],
    [510, 1000],
  ])('the axis for %s ends at %s', (greatest, top) => expect(axisOf(greatest)).toEqual([0, top / 2, top]))
  test.each([
    [30, 50],
    [61, 120],
    [5000, 7200],
    [100_000, 172_800],
  ])('the axis for %s s ends at %s s', (greatest, top) => expect(timeAxisOf(greatest)).toEqual([0, top / 2, top]))
  test('axes have short values', () => {
    expect([0, 30, 1800, 5400, 86400].map(timeTick)).toEqual(['0', '30 s', '30 min', '1.5 h', '1 d'])
    expect([0, 0.5, 250, 1500].map(moneyTick)).toEqual(['$0', '$0.5', '$250', '$1.5K'])
    expect([0, 0.5, 1].map(ratioTick)).toEqual(['0 %', '50 %', '100 %'])
  })
  test('a bucket in which nothing existed is left out of the table', () => {
    const buckets = [
      bucket({ AccountingSeconds: { queue: 0 } }),
      bucket({ AccountingSeconds: { queue: 1 } }),
      bucket({ IdleNodeSeconds: { spare: 1 } }),
    ]
    expect(busyBuckets(report({ Buckets: buckets }))).toEqual(buckets.slice(1))
  })
  test('a bucket is named by its day, and by its hour if it is shorter', () => {
    const at = (text: string) => Date.parse(`2026-03-01T${text}Z`) / 1000
    const hour = { start: at('00:00'), end: at('01:00') }
    expect([isHourly([hour]), isHourly([{ start: hour.start, end: hour.start + DAY }, hour])]).toEqual([true, false])
    expect([bucketWords(at('13:00'), false), bucketWords(at('13:00'), true)]).toEqual(['1 Mar', '1 Mar 13:00'])
  })
})

describe('CSV', () => {
  const whole = figures({
    CostUsd: 20,
    EttrRatio: 0.5,
    AccountingSeconds: { train: 30 },
    Failures: incidents({ Count: 1, CostUsd: 3 }),
  })
  const full = report({
    Buckets: [{ StartTime: NOW, EndTime: NOW + 3600, Figures: whole }],
    Projects: [{ Project: '=a,"b"', Figures: whole }],
    Fleets: [{ FleetName: 'main', Figures: whole }],
    Jobs: [{ TrainingJobName: 'gpt', RunId: 'r', Project: 'p', FleetName: 'main', Figures: whole }],
    OtherJobs: whole,
    Causes: [{ Cause: 'hang', Kind: 'Failure', Incidents: incidents({ Count: 1 }) }],
  })
  const cells = (text: string) => {
    const [head, ...rows] = text
      .trimEnd()
      .split('\r\n')
      .map((line) => line.split(','))
    return rows.map((row) => Object.fromEntries(head!.map((name, index) => [name, row[index]])))
  }
  test('has one row per bucket and an empty cell for an absent figure', () => {
    const [row] = cells(csvOf(full, 'buckets'))
    expect(row).toMatchObject({
      StartTime: '2026-03-01T12:30:00Z',
      CostUsd: '20',
      FailuresCostUsd: '3',
      TrainSeconds: '30',
      QueueSeconds: '0',
      MttrSeconds: '',
    })
  })
  test('has a row for the jobs that are not listed', () => {
    expect(cells(csvOf(full, 'jobs')).map((row) => row.TrainingJobName)).toEqual(['gpt', '(other jobs)'])
  })
  test('quotes text and never contains a formula', () => {
    expect(csvOf(full, 'projects').split('\r\n')[1]).toMatch(/^"'=a,""b""",/)
  })
  test('is empty without rows', () =>
    expect(CSV_KINDS.map((kind) => csvOf(report(), kind))).toEqual(['', '', '', '', '']))
  test('of causes', () =>
    expect(csvOf(full, 'causes')).toBe(
      'Cause,Kind,Count,RecoveredCount,RecoverySeconds,RecomputedSteps,CostUsd\r\nhang,Failure,1,0,0,0,\r\n',
    ))
})

describe('outputs', () => {
  const file = (Generation: number, Path: string, Bytes = 1): OutputEntry => ({
    Generation,
    Path,
    Bytes,
    Key: `${Generation}/${Path}`,
  })
  test('are grouped by generation, the newest first, files in natural order', () => {
    const found = byGeneration([file(2, 'rank=10/a', 5), file(10, 'x'), file(2, 'rank=9/a', 7)])
    expect(found.map((group) => [group.generation, group.bytes, group.files.map((each) => each.Path)])).toEqual([
      [10, 1, ['x']],
      [2, 12, ['rank=9/a', 'rank=10/a']],
    ])
  })
  test('are filtered by path', () => {
    expect(
      byGeneration([file(1, 'rank=0/Model.bin'), file(2, 'log')], 'model').map((group) => group.generation),
    ).toEqual([1])
  })
  test('a job name with a space is quoted for the shell', () =>
    expect([shellWord('gpt-2'), shellWord("it's")]).toEqual(['gpt-2', "'it'\\''s'"]))
})
