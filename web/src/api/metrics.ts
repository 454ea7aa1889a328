/** Asks for the metrics of a job. A refresh receives only what changed since the last one. */
import { queryOptions } from '@tanstack/react-query'

import { mergedMetrics, START, type Logged } from '../model/changes'
import type { Window } from '../model/metrics'
import { call } from './client'

/** Points of each metric: a chart is not much wider. */
const MAX_POINTS = 1_000
const REFRESH_MS = 5_000

export interface LoggedData {
  /** Identifies the state of the metrics for the next request. */
  token: string
  metrics: Logged
}

/** All metrics of a job, or the part in a window, in at most as many points as a chart has room for. */
export const metricsQuery = (name: string, window?: Window) => {
  const queryKey = ['metrics', name, ...(window ? [window] : [])]
  return queryOptions({
    queryKey,
    queryFn: async ({ signal, client }): Promise<LoggedData> => {
      const held = client.getQueryData<LoggedData>(queryKey)
      const asked = {
        TrainingJobName: name,
        MaxPoints: MAX_POINTS,
        ChangesSince: held?.token ?? START,
        ...within(window),
      }
      const answer = await call('GetMetricData', asked, signal)
      return { token: answer.Changes?.ChangeToken ?? START, metrics: mergedMetrics(held?.metrics ?? new Map(), answer) }
    },
    structuralSharing: (before, now) =>
      (before as LoggedData)?.metrics === (now as LoggedData).metrics ? before : now,
    refetchInterval: REFRESH_MS,
  })
}

function within(window?: Window) {
  if (!window) return {}
  const [from, to] = [Math.max(0, window.from), Math.max(0, window.to)]
  return window.axis === 'wall'
    ? { StartTime: from, EndTime: to }
    : { FirstStep: Math.floor(from), LastStep: Math.ceil(to) }
}
