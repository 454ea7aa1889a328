/** A metric as one line per node or rank: which lines stand out, their colours, and the line at the cursor. Pure. */
import type { MetricDataResult, MetricSeries } from '../contract'
import { nearestPlace, type Line } from './chart'

export type SeriesKind = NonNullable<MetricDataResult['SeriesKind']>

/** Maximum number of nodes or ranks whose values the service stores (`MAX_SERIES` of the protocol). */
export const MAX_SERIES = 64
/** Number of lines with a colour and a name. The other lines are grey. */
export const MAX_COLOURED = 8
/** The colour number of lines that do not stand out. */
export const GREY = 0

/** The values of one metric on one node or one rank. */
export interface Part {
  nodeId?: string
  rank?: number
  metric: MetricDataResult
}

/** Return one metric per node, in the order of their ids, or per rank, in the order of their numbers. */
export function parts(metric: MetricDataResult): Part[] {
  const order = (a: MetricSeries, b: MetricSeries) =>
    (a.Rank ?? 0) - (b.Rank ?? 0) || (a.NodeId ?? '').localeCompare(b.NodeId ?? '')
  return (metric.Series ?? []).toSorted(order).map(({ NodeId, Rank, Values }) => ({
    nodeId: NodeId,
    rank: Rank,
    metric: { ...metric, Means: Values, Minimums: Values, Maximums: Values, MinimumNodeIds: [], MaximumNodeIds: [] },
  }))
}

type Values = readonly (number | null)[]

/** Return for each line its mean distance from the median of all lines. 0 for a line without values. */
export function deviations(lines: readonly Values[]): number[] {
  const sums = lines.map(() => 0)
  const counts = lines.map(() => 0)
  for (let place = 0; place < (lines[0]?.length ?? 0); place += 1) {
    const present = lines.flatMap((line) => line[place] ?? []).sort((a, b) => a - b)
    const middle = present.length >> 1
    const median = present.length % 2 ? present[middle]! : (present[middle - 1]! + present[middle]!) / 2
    lines.forEach((line, index) => {
      const value = line[place]
      if (value == null) return
      sums[index]! += Math.abs(value - median)
      counts[index]! += 1
    })
  }
  return sums.map((sum, index) => sum / Math.max(1, counts[index]!))
}

/**
 * Return the indexes of the lines that deviate most, the largest deviation first, and the colour of every line.
 *
 * The colours follow the order of the lines, so that a line keeps its colour while the same lines stand out.
 */
export function standingOut(lines: readonly Values[]): { places: number[]; colours: number[] } {
  const far = deviations(lines)
  const places = lines
    .map((_, place) => place)
    .sort((a, b) => far[b]! - far[a]! || a - b)
    .slice(0, MAX_COLOURED)
  const inOrder = places.toSorted((a, b) => a - b)
  return { places, colours: lines.map((_, place) => inOrder.indexOf(place) + 1 || GREY) }
}

/** Return the index of the line whose value is nearest to a point of the chart. -1 if no line has a value at `x`. */
export function nearestLine(lines: readonly Line[], x: number, y: number): number {
  let [found, least] = [-1, Infinity]
  lines.forEach((line, place) => {
    const value = line.y[nearestPlace(line.x, x)]
    if (value == null || Math.abs(value - y) >= least) return
    ;[found, least] = [place, Math.abs(value - y)]
  })
  return found
}
