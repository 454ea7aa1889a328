/** Requests the metrics of a job. A refresh receives only the points that changed since the previous response. */
import { queryOptions } from '@tanstack/react-query'

import type { GetMetricDataRequest } from '../contract'
import { mergedMetrics, START, type Logged } from '../model/changes'
import type { SeriesKind } from '../model/breakdown'
import type { Window } from '../model/metrics'
import { call } from './client'

/** Maximum number of points of a metric, about the width of a chart in pixels. */
const MAX_POINTS = 1_000
/** Maximum number of points of each line, for a metric with one line per node or rank. */
const SERIES_POINTS = 400
const REFRESH_MS = 5_000

export interface LoggedData {
  /** Value of ChangesSince in the next request, whose response then contains only later changes. */
  token: string
  metrics: Logged
}

/** Query of all metrics of a job, each with at most `MAX_POINTS` points. `window`: only this part of the axis. */
export const metricsQuery = (name: string, window?: Window) =>
  dataQuery(['metrics', name, ...(window ? [window] : [])], { TrainingJobName: name, ...within(window) })

/** Query of one metric of a job, with one line per node or rank. `window`: only this part of the axis. */
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
