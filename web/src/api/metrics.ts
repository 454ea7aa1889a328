/** What a job's script has logged, as points: the one place that knows which operation gives them. */
import { queryOptions } from '@tanstack/react-query'

import type { Metric } from '../contract'
import type { Point } from '../model/metrics'
import { call } from './client'
import { FAST_MS } from './queries'

const PAGE = 1_000
const MOST_PAGES = 100

const pointOf = (metric: Metric): Point => ({ step: metric.Step, generation: metric.Generation, values: metric.Values ?? {} })

/** Everything that was logged; a refresh asks only for later steps, but a new launch asks for all again: it does steps once more. */
export const metricsQuery = (name: string, generation: number) => {
  const queryKey = ['metrics', name, generation]
  return queryOptions({
    queryKey,
    queryFn: async ({ signal, client }): Promise<Point[]> => {
      const held = [...(client.getQueryData<Point[]>(queryKey) ?? [])]
      for (let pages = 0; pages < MOST_PAGES; pages += 1) {
        const AfterStep = held.at(-1)?.step ?? -1
        const fresh = (await call('ListMetrics', { TrainingJobName: name, AfterStep, MaxResults: PAGE }, signal)).Metrics ?? []
        held.push(...fresh.map(pointOf))
        if (fresh.length < PAGE) break
      }
      return held
    },
    refetchInterval: FAST_MS,
  })
}
