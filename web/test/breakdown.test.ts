/** In a chart with a line per node or rank, the most deviating lines have colours, and the cursor finds its line. */
import { describe, expect, test } from 'vitest'

import type { MetricDataResult } from '../src/contract'
import { deviations, GREY, MAX_COLOURED, nearestLine, parts, standingOut } from '../src/model/breakdown'

const metric = (Series: MetricDataResult['Series']): MetricDataResult => ({
  MetricName: 'gpu',
  Steps: [1, 2],
  LastSteps: [1, 2],
  Times: [10, 20],
  Counts: [3, 3],
  Minimums: [1, 1],
  Means: [2, 2],
  Maximums: [3, 3],
  LastValues: [2, 2],
  MinimumNodeIds: ['i-a', 'i-a'],
  MaximumNodeIds: ['i-b', 'i-b'],
  Series,
})

describe('the parts of a metric', () => {
  test('are nodes by id, or ranks by number', () => {
    const nodes = parts(
      metric([
        { NodeId: 'i-b', Values: [1, 2] },
        { NodeId: 'i-a', Values: [3, 'NaN'] },
      ]),
    )
    expect(nodes.map(({ nodeId }) => nodeId)).toEqual(['i-a', 'i-b'])
    expect(nodes[0]!.metric).toMatchObject({ Means: [3, 'NaN'], Minimums: [3, 'NaN'], Maximums: [3, 'NaN'] })
    expect(nodes[0]!.metric.MinimumNodeIds).toEqual([])
    expect(parts(metric([10, 9].map((Rank) => ({ Rank, Values: [1, 2] })))).map(({ rank }) => rank)).toEqual([9, 10])
  })
  test('are absent in a response without series', () => expect(parts(metric(undefined))).toEqual([]))
})

describe('the deviation of a line', () => {
  test('is its mean distance from the median of all lines', () =>
    expect(
      deviations([
        [1, 1],
        [2, 2],
        [9, 3],
      ]),
    ).toEqual([1, 0, 4]))
  test('counts only points at which the line has a value', () =>
    expect(
      deviations([
        [null, 4],
        [2, 2],
        [2, 2],
        [null, null],
      ]),
    ).toEqual([2, 0, 0, 0]))
  test('is relative to the mean of the two middle values of an even number of lines', () =>
    expect(deviations([[1], [2], [4], [9]])).toEqual([2, 1, 1, 6]))
})

describe('the lines that stand out', () => {
  test('are sorted by deviation, and keep their colours while the same lines stand out', () => {
    expect(standingOut([[0], [5], [0], [0], [-9]])).toEqual({ places: [4, 1, 0, 2, 3], colours: [1, 2, 3, 4, 5] })
    expect(standingOut([[0], [9], [0], [0], [-5]])).toEqual({ places: [1, 4, 0, 2, 3], colours: [1, 2, 3, 4, 5] })
  })
  test.each([0, 1, 2, 3, 4])('are the same for every order of 20 lines: %i', (seed) => {
    const lines = Array.from({ length: 20 }, (_, place) => [((place + seed) * 7) % 20])
    const { places, colours } = standingOut(lines)
    expect(places).toHaveLength(MAX_COLOURED)
    expect(places.map((place) => lines[place]![0]!).sort((a, b) => a - b)).toEqual([0, 1, 2, 3, 16, 17, 18, 19])
    expect(colours.filter((colour) => colour !== GREY).sort((a, b) => a - b)).toEqual([1, 2, 3, 4, 5, 6, 7, 8])
    expect(places.every((place) => colours[place] !== GREY)).toBe(true)
  })
})

describe('the line at the cursor', () => {
  const lines = [
    { x: [1, 2, 3], y: [0, 10, 20] },
    { x: [1, 2, 3], y: [5, null, 5] },
  ]
  test.each([
    [1.2, 1, 0],
    [1.2, 4, 1],
    [2.2, 5, 0],
    [2.9, 6, 1],
  ])('at (%d, %d) is line %i', (x, y, line) => expect(nearestLine(lines, x, y)).toBe(line))
  test('is the first of two lines at the same distance', () => expect(nearestLine(lines, 1, 2.5)).toBe(0))
  test('is none where no line has a value', () => expect(nearestLine([lines[1]!], 2, 5)).toBe(-1))
})
