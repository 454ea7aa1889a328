/** Charts format figures, choose round ticks, smooth lines and mark failures. Comparisons list how runs differ. */
import { describe, expect, test } from 'vitest'

import type { TrainingJob } from '../src/contract'
import {
  aligned,
  binarySteps,
  compact,
  elapsedTicks,
  elapsedWords,
  figure,
  limits,
  marks,
  momentWords,
  nearestPlace,
  offsetOf,
  positionWords,
  positive,
  rangeOf,
  rangeParameters,
  smoothed,
  tablePlaces,
  timeLabels,
  timeTicks,
} from '../src/model/chart'
import { differences } from '../src/model/compare'

const NOON = Date.UTC(2026, 2, 1, 12) / 1000

test.each([
  [2.31687, 'number', '2.317'],
  [0.00031, 'number', '3.1e-4'],
  [0, 'number', '0'],
  [48_215.4, 'number', '48,215'],
  [1e12, 'number', '1e12'],
  [-3.5, 'number', '-3.5'],
  [93.21, 'percent', '93.21 %'],
  [0.0042, 'seconds', '4.2 ms'],
  [3.2, 'seconds', '3.2 s'],
  [0, 'seconds', '0 s'],
  [1536, 'bytes', '1.5 KiB'],
  [1.5 * 2 ** 30, 'bytes/s', '1.5 GiB/s'],
  [null, 'number', '–'],
  [undefined, 'bytes', '–'],
] as const)('%s as %s is %s', (value, unit, text) => expect(figure(value, unit)).toBe(text))

test('ticks of bytes are round in the unit of the largest value', () => {
  const gigabyte = 2 ** 30
  expect(binarySteps(1.5 * gigabyte)).toContain(0.1 * gigabyte)
  expect(binarySteps(340 * 2 ** 20)).toContain(20 * 2 ** 20)
  expect(binarySteps(0)).toContain(1)
})

describe('ticks of time', () => {
  test.each([
    [
      0,
      60,
      6,
      [0, 10, 20, 30, 40, 50, 60],
      ['12:00:00', '12:00:10', '12:00:20', '12:00:30', '12:00:40', '12:00:50', '12:01:00'],
    ],
    [7, 3600, 4, [900, 1800, 2700, 3600], ['12:15', '12:30', '12:45', '13:00']],
    [0, 86400, 4, [0, 21600, 43200, 64800, 86400], ['12:00', '18:00', '2 Mar', '06:00', '12:00']],
  ])('from %i to %i s', (from, to, most, ticks, labels) => {
    const found = timeTicks(NOON + from, NOON + to, most, 'utc')
    expect(found.map((at) => at - NOON)).toEqual(ticks)
    expect(timeLabels(found, 'utc')).toEqual(labels)
  })
  test.each([30, 600, 7200, 100_000, 3_000_000, 90_000_000])('over %i s are few, rising and inside', (span) => {
    const found = timeTicks(NOON + 3, NOON + 3 + span, 8, 'utc')
    expect(found.length).toBeGreaterThanOrEqual(2)
    expect(found.length).toBeLessThanOrEqual(9)
    expect(
      found.every((at, index) => at >= NOON + 3 && at <= NOON + 3 + span && (index === 0 || at > found[index - 1]!)),
    ).toBe(true)
  })
  test('of local time are round in the local zone', () => {
    const offset = offsetOf('local', NOON)
    for (const at of timeTicks(NOON, NOON + 86400, 4, 'local')) expect((at + offset) % 21600).toBe(0)
    expect(offsetOf('utc', NOON)).toBe(0)
  })
  test('a moment names its date and zone', () => expect(momentWords(NOON + 5, 'utc')).toBe('1 Mar 12:00:05 UTC'))
})

test('ticks of elapsed time are round spans', () => expect(elapsedTicks(10, 3700, 4)).toEqual([1800, 3600]))
test.each([
  [5, '0:05'],
  [65, '1:05'],
  [3900, '1:05:00'],
  [90_000, '1 d 01:00'],
])('%i s elapsed are %s', (seconds, text) => expect(elapsedWords(seconds)).toBe(text))
test.each([
  [950, '950'],
  [12_500, '12.5k'],
  [3_210_000, '3.21M'],
  [1.1e12, '1.1T'],
])('%d is %s in short', (value, text) => expect(compact(value)).toBe(text))
test.each([
  ['step', 1204, 'step 1,204'],
  ['tokens', 2e9, '2B tokens'],
  ['elapsed', 65, '1:05 after the start'],
  ['wall', NOON, '1 Mar 12:00:00 UTC'],
] as const)('a position on the axis of %s', (axis, x, text) => expect(positionWords(axis, x, 'utc')).toBe(text))

describe('the moving average', () => {
  test('of equal values is that value, from the first point on', () => {
    for (const value of smoothed([5, 5, null, 5], 0.9)) if (value !== null) expect(value).toBeCloseTo(5, 12)
  })
  test('keeps gaps and continues after them', () => {
    const [first, gap, last] = smoothed([1, null, 3], 0.5)
    expect([first, gap]).toEqual([1, null])
    expect(last).toBeCloseTo((0.25 * 1 + 0.5 * 3) / 0.75, 12)
  })
  test('with no weight on the past is the line itself', () => expect(smoothed([1, null, 3], 0)).toEqual([1, null, 3]))
  test('stays between the extremes and follows slower with more weight', () => {
    const jump = [...Array<number>(20).fill(0), ...Array<number>(20).fill(1)]
    const [fast, slow] = [smoothed(jump, 0.6), smoothed(jump, 0.97)]
    expect(fast[25]).toBeGreaterThan(slow[25]!)
    expect([...fast, ...slow].every((value) => value! >= 0 && value! <= 1)).toBe(true)
  })
})
test('a logarithmic axis drops zero and negative values', () =>
  expect(positive([1, 0, -2, null, 0.1])).toEqual([1, null, null, null, 0.1]))

describe('several lines', () => {
  test('share one axis: undefined where only another line has a point', () =>
    expect(
      aligned([
        { x: [1, 3], y: [10, null] },
        { x: [2, 3], y: [20, 30] },
      ]),
    ).toEqual({
      x: [1, 2, 3],
      columns: [
        [10, undefined, null],
        [undefined, 20, 30],
      ],
    }))
  test('one line stays as it is', () =>
    expect(aligned([{ x: [2, 5], y: [1, null] }])).toEqual({ x: [2, 5], columns: [[1, null]] }))
})
test.each([
  [0, 0],
  [1.4, 0],
  [1.6, 1],
  [2, 1],
  [99, 2],
])('the point nearest to %d', (at, place) => expect(nearestPlace([1, 2, 5], at)).toBe(place))
test('no point is nearest in an empty line', () => expect(nearestPlace([], 1)).toBe(-1))

describe('a range', () => {
  const line = { x: [10, 20, 110], y: [1, 2, 3] }
  test.each([
    ['', undefined],
    ['last=100', { last: 100 }],
    ['from=5&to=9', { from: 5, to: 9 }],
    ['from=9&to=5', undefined],
    ['from=1', undefined],
    ['last=x', undefined],
  ])('in the address %j', (text, range) => expect(rangeOf(new URLSearchParams(text))).toEqual(range))
  test.each([
    [undefined, 'step'],
    [{ last: 100 }, 'step'],
    [{ from: 5, to: 9 }, 'step'],
    [{ from: 5.2, to: 9.7 }, 'wall'],
  ] as const)('%j survives the address', (range, axis) =>
    expect(rangeOf(new URLSearchParams(rangeParameters(range, axis)))).toEqual(range),
  )
  test('of a short drag over steps still spans a step', () =>
    expect(rangeParameters({ from: 5.1, to: 5.3 }, 'step')).toEqual({ last: '', from: '5', to: '6' }))
  test('limits the axis', () => {
    expect(limits([line], undefined)).toEqual([10, 110])
    expect(limits([line, { x: [5], y: [1] }], undefined)).toEqual([5, 110])
    expect(limits([line], { last: 50 })).toEqual([60, 110])
    expect(limits([line], { last: 500 })).toEqual([10, 110])
    expect(limits([line], { from: 0, to: 7 })).toEqual([0, 7])
    expect(limits([{ x: [4], y: [1] }], undefined)).toEqual([3, 5])
    expect(limits([{ x: [], y: [] }], undefined)).toBeUndefined()
  })
})

describe('marks of failures', () => {
  const fault = (number: number, from: number, to = from) => ({
    number,
    from,
    to,
    incidentId: `i${number}`,
    cause: 'node_fault',
  })
  test('that are close together are one mark', () => {
    const found = marks([fault(1, 10), fault(2, 12), fault(3, 50)], [0, 100], 400, 24)
    expect(found.map((mark) => [mark.left, mark.faults.map((each) => each.number)])).toEqual([
      [40, [1, 2]],
      [200, [3]],
    ])
  })
  test('outside the visible range are not drawn, and one that began before it is at its start', () =>
    expect(marks([fault(1, 5, 8), fault(2, 5, 20), fault(3, 200)], [10, 110], 400, 24)).toMatchObject([
      { left: 0, faults: [{ number: 2 }] },
    ]))
})

test.each([
  [3, [0, 1, 2]],
  [5, [0, 1, 2, 3, 4]],
  [9, [0, 2, 4, 6, 8]],
])('a table of %i points has evenly spaced rows', (length, places) => expect(tablePlaces(length, 5)).toEqual(places))

test('runs differ in hyperparameters and settings, and names or secrets are not compared', () => {
  const run = (change: object) =>
    ({
      TrainingJobName: 'a',
      HyperParameters: { lr: '1e-4', width: '8' },
      Environment: { KEY: 'a' },
      NodeCount: 4,
      CheckpointConfig: { EverySteps: 25 },
      ...change,
    }) as unknown as TrainingJob
  const other = run({
    TrainingJobName: 'b',
    HyperParameters: { lr: '3e-4', width: '8', warmup: '10' },
    Environment: { KEY: 'b' },
    NodeCount: 8,
  })
  expect(differences([run({}), other])).toEqual([
    { name: 'lr', values: ['1e-4', '3e-4'] },
    { name: 'warmup', values: [undefined, '10'] },
    { name: 'NodeCount', values: ['4', '8'] },
  ])
  expect(differences([run({}), run({ CheckpointConfig: { EverySteps: 50 } })])).toEqual([
    { name: 'CheckpointConfig.EverySteps', values: ['25', '50'] },
  ])
  expect(differences([run({}), run({})])).toEqual([])
})
