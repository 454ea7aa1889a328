/** Applies a response that contains only changes to the data of earlier responses. Pure. */
import type { Changes, GetMetricDataResponse, MetricDataResult, MetricSeries, TrainingJobSummary } from '../contract'

/** Value of ChangesSince with which the response contains all data. */
export const START = 'Start'

/** Return the items by key after a response to a request with ChangesSince. Unchanged items remain the same objects. */
export function merged<T>(
  held: ReadonlyMap<string, T>,
  changes: Changes | undefined,
  items: readonly T[],
  key: (item: T) => string,
): ReadonlyMap<string, T> {
  if (!changes?.IsIncremental) return new Map(items.map((item) => [key(item), item]))
  if (!items.length && !changes.Removed.length) return held
  const found = new Map(held)
  for (const removed of changes.Removed) found.delete(removed)
  for (const item of items) found.set(key(item), item)
  return found
}

/** The columns of a metric: entry i of each one describes point i. */
export const COLUMNS = [
  'Steps',
  'LastSteps',
  'Times',
  'Counts',
  'Minimums',
  'Means',
  'Maximums',
  'LastValues',
  'MinimumNodeIds',
  'MaximumNodeIds',
] as const satisfies readonly (keyof MetricDataResult)[]

/** Metrics by name. */
export type Logged = ReadonlyMap<string, MetricDataResult>

/**
 * Return all points of all metrics after a response to GetMetricData with ChangesSince.
 *
 * The service names how many leading points of a metric are unchanged. All later points are replaced: training appends
 * points, and a recovery removes the points of the steps that it repeats.
 */
export function mergedMetrics(held: Logged, { MetricDataResults = [], Changes }: GetMetricDataResponse): Logged {
  const whole = MetricDataResults.map((result) => spliced(held.get(result.MetricName), result))
  return merged(held, Changes, whole, (result) => result.MetricName)
}

function spliced(before: MetricDataResult | undefined, result: MetricDataResult): MetricDataResult {
  const { KeptPointCount: kept = 0, ...joined } = result
  if (!before || !kept) return joined
  for (const column of COLUMNS) {
    Object.assign(joined, { [column]: [...before[column].slice(0, kept), ...result[column]] })
  }
  if (result.Series) joined.Series = splicedSeries(before.Series ?? [], result.Series, kept, result.Steps.length)
  return joined
}

/** Return the values of each node or rank after a response. Nodes and ranks without any value are missing. */
function splicedSeries(
  before: readonly MetricSeries[],
  result: readonly MetricSeries[],
  kept: number,
  added: number,
): MetricSeries[] {
  const key = (each: MetricSeries) => each.NodeId ?? each.Rank
  const missing = (length: number): MetricSeries['Values'] => Array(length).fill('NaN')
  const [old, fresh] = [before, result].map((list) => new Map(list.map((each) => [key(each), each])))
  return [...new Map([...old!, ...fresh!]).values()].map((each) => ({
    ...each,
    Values: [
      ...(old!.get(key(each))?.Values.slice(0, kept) ?? missing(kept)),
      ...(fresh!.get(key(each))?.Values ?? missing(added)),
    ],
  }))
}

/** Return jobs in the order of the service: by creation, the newest first, and by RunId at equal times. */
export function newestFirst(jobs: ReadonlyMap<string, TrainingJobSummary>): TrainingJobSummary[] {
  const byRunId = (a: string, b: string) => (a < b ? 1 : a > b ? -1 : 0)
  return [...jobs.values()].sort((a, b) => b.CreationTime - a.CreationTime || byRunId(a.RunId, b.RunId))
}
