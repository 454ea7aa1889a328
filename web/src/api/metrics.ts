/** Asks for the metrics of a job. A refresh receives only what changed since the last one. */
import { queryOptions } from '@tanstack/react-query'

import type { GetMetricDataRequest } from '../contract'
import { mergedMetrics, START, type Logged } from '../model/changes'
import type { SeriesKind } from '../model/breakdown'
import type { Window } from '../model/metrics'
import { call } from './client'

/** Points of each metric: a chart is not much wider. */
const MAX_POINTS = 1_000
/** Points of a metric with a line per node or rank. */
const SERIES_POINTS = 400
const REFRESH_MS = 5_000

export interface LoggedData {
  /** Identifies the state of the metrics for the next request. */
  token: string
  metrics: Logged
}

/** All metrics of a job, or the part in a window, in at most as many points as a chart has room for. */
export const metricsQuery = (name: string, window?: Window) =>
  dataQuery(['metrics', name, ...(window ? [window] : [])], { TrainingJobName: name, ...within(window) })

/** One metric of a job by node or by rank, or the part in a window. */
export const seriesQuery = (name: string, MetricName: string, Series: SeriesKind, window?: Window) =>
  dataQuery(['metrics', name, MetricName, Series, ...(window ? [window] : [])], {
    TrainingJobName: name,
    MetricName,
    Series,
    MaxPoints: SERIES_POINTS,
    ...within(window),
  })

function dataQuery(queryKey: unknown[], request: GetMetricDataRequest) {
  return queryOptions({
    queryKey,
    queryFn: async ({ signal, client }): Promise<LoggedData> => {
      const held = client.getQueryData<LoggedData>(queryKey)
      const asked = { MaxPoints: MAX_POINTS, ...request, ChangesSince: held?.token ?? START }
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
