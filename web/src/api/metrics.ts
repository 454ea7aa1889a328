/** What a job's script has logged, as points: the one place that knows which operation gives them. */
import { queryOptions } from '@tanstack/react-query'

import type { MetricDataResult } from '../contract'
import type { Point } from '../model/metrics'
import { call } from './client'

/** Of each metric: a chart is not much wider. */
const MOST_POINTS = 1_000
const REFRESH_MS = 5_000

/** Metrics side by side: a point that joins several steps lies at the last of them, and has their mean. */
export function pointsOf(results: MetricDataResult[]): Point[] {
  const points = new Map<number, Point>()
  for (const { MetricName, LastSteps, Times, Means } of results) {
    LastSteps.forEach((step, index) => {
      const point: Point = points.get(step) ?? { step, at: Times[index]!, values: {} }
      point.values[MetricName] = Means[index] ?? null
      points.set(step, point)
    })
  }
  return [...points.values()].sort((a, b) => a.step - b.step)
}

/** Everything that was logged, joined into as many points as a chart has room for. Steps that were done again are there once. */
export const metricsQuery = (name: string) =>
  queryOptions({
    queryKey: ['metrics', name],
    queryFn: async ({ signal }): Promise<Point[]> => pointsOf((await call('GetMetricData', { TrainingJobName: name, MaxPoints: MOST_POINTS }, signal)).MetricDataResults ?? []),
    refetchInterval: REFRESH_MS,
  })
