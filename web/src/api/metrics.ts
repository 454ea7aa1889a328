/** What a job's script has logged, as points: the one place that knows which operation gives them. */
import { queryOptions } from '@tanstack/react-query'

import type { MetricDataResult } from '../contract'
import type { Point, Window } from '../model/metrics'
import { call } from './client'

/** Of each metric: a chart is not much wider. */
const MOST_POINTS = 1_000
const REFRESH_MS = 5_000

/** Metrics side by side: a point that joins several steps lies at the last of them, and has their mean, the least and the most. */
export function pointsOf(results: MetricDataResult[]): Point[] {
  const points = new Map<number, Point>()
  for (const { MetricName, Steps, LastSteps, Times, Minimums, Means, Maximums, MinimumNodeIds, MaximumNodeIds } of results) {
    LastSteps.forEach((step, index) => {
      const point: Point = points.get(step) ?? { step, firstStep: Steps[index]!, at: Times[index]!, values: {}, least: {}, most: {} }
      point.firstStep = Math.min(point.firstStep, Steps[index]!)
      point.values[MetricName] = Means[index] ?? null
      point.least[MetricName] = Minimums[index] ?? null
      point.most[MetricName] = Maximums[index] ?? null
      if (MinimumNodeIds.length) {
        point.leastOn = { ...point.leastOn, [MetricName]: MinimumNodeIds[index] }
        point.mostOn = { ...point.mostOn, [MetricName]: MaximumNodeIds[index] }
      }
      points.set(step, point)
    })
  }
  return [...points.values()].sort((a, b) => a.step - b.step)
}

/** What was logged, or what was in a window of it, joined into as many points as a chart has room for. Steps that were done again are there once. */
export const metricsQuery = (name: string, window?: Window) =>
  queryOptions({
    queryKey: ['metrics', name, ...(window ? [window] : [])],
    queryFn: async ({ signal }): Promise<Point[]> => pointsOf((await call('GetMetricData', { TrainingJobName: name, MaxPoints: MOST_POINTS, ...within(window) }, signal)).MetricDataResults ?? []),
    refetchInterval: REFRESH_MS,
  })

function within(window?: Window) {
  if (!window) return {}
  return window.axis === 'wall' ? { StartTime: window.from, EndTime: window.to } : { FirstStep: Math.max(0, Math.floor(window.from)), LastStep: Math.max(0, Math.ceil(window.to)) }
}
