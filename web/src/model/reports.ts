/** Computes the time range, the trends and the CSV files of the Reports page from a report of the API. Pure. */
import type { Report, ReportFigures, ReportIncidents } from '../contract'
import { TIME } from '../words/jobTabs'
import { duration } from './format'

const HOURS = { '24h': 24, '7d': 168, '30d': 720, '90d': 2160 } as const
export const RANGES = [...(Object.keys(HOURS) as (keyof typeof HOURS)[]), 'custom'] as const
export type Range = (typeof RANGES)[number]
const HOUR = 3600

/** The time range that the page's URL names, in Unix seconds. Without `end`, the range ends now. */
export interface Span {
  range: Range
  start: number
  end?: number
}

/** A day such as `2026-03-01`, as Unix seconds at 00:00 UTC. undefined for any other text. */
const dayOf = (text: string | null): number | undefined => {
  const at = /^\d{4}-\d\d-\d\d$/.test(text ?? '') ? Date.parse(`${text}T00:00:00Z`) : NaN
  return Number.isNaN(at) ? undefined : at / 1000
}

/** Unix seconds as a day in UTC, such as `2026-03-01`. */
export const isoDay = (at: number): string => new Date(at * 1000).toISOString().slice(0, 10)

/**
 * The time range that the query of the page's URL names, 7 days by default.
 *
 * `range=custom` needs `from` and `to`, the first and the last day in UTC. A custom range without valid days, or whose
 * last day precedes its first, becomes the default range.
 */
export function spanOf(search: URLSearchParams, now: number): Span {
  const range = RANGES.find((each) => each === search.get('range')) ?? '7d'
  if (range !== 'custom') return { range, start: now - HOURS[range] * HOUR }
  const from = dayOf(search.get('from'))
  const to = dayOf(search.get('to'))
  return from === undefined || to === undefined || to < from
    ? { range: '7d', start: now - HOURS['7d'] * HOUR }
    : { range, start: from, end: to + 24 * HOUR }
}

/** 00:00 UTC of the day of `now`. At 00:00 itself, the second before, because a time range must not be empty. */
export const startOfDay = (now: number): number => Math.min(now - 1, Math.floor(now / 86400) * 86400)

/** A dollar amount; a dash without one. */
export function money(usd?: number): string {
  if (usd === undefined) return '–'
  if (usd > 0 && usd < 0.01) return '< $0.01'
  const digits = usd >= 1000 ? 0 : 2
  return usd.toLocaleString('en-US', {
    style: 'currency',
    currency: 'USD',
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  })
}

/** A time such as MTTF; a dash without one. */
export const span = (seconds?: number): string => (seconds === undefined ? '–' : duration(seconds))

/** A ratio in percent with one decimal, never rounded up to 100 %; a dash without one. */
export const ratio = (value?: number): string =>
  value === undefined ? '–' : value >= 1 ? '100 %' : `${Math.min(99.9, Math.round(value * 1000) / 10).toFixed(1)} %`

/** A value of a time axis in its largest unit, with at most one decimal, such as `30 min` or `1.5 h`. */
export function timeTick(seconds: number): string {
  const [unit, size] =
    seconds >= 86400 ? ['d', 86400] : seconds >= HOUR ? ['h', HOUR] : seconds >= 60 ? ['min', 60] : ['s', 1]
  return seconds === 0 ? '0' : `${Number((seconds / Number(size)).toFixed(1))} ${unit}`
}

/** A value of a cost axis, such as `$250` or `$1.5K`. */
export const moneyTick = (usd: number): string =>
  usd.toLocaleString('en-US', {
    style: 'currency',
    currency: 'USD',
    notation: 'compact',
    minimumFractionDigits: 0,
    maximumFractionDigits: usd < 1 ? 2 : 1,
  })

/** A value of a ratio axis, such as `50 %`. */
export const ratioTick = (value: number): string => `${Math.round(value * 100)} %`

/** The time buckets of a report in which a job or an idle node existed. */
export const busyBuckets = (report: Report): Report['Buckets'] =>
  report.Buckets.filter(({ Figures }) =>
    [...Object.values(Figures.AccountingSeconds), ...Object.values(Figures.IdleNodeSeconds)].some(
      (seconds) => seconds > 0,
    ),
  )

/** Seconds of nodes or ranks as hours, such as `1,204.5`. */
export const hours = (seconds: number): string =>
  (seconds / HOUR).toLocaleString('en-US', { maximumFractionDigits: seconds >= 1000 * HOUR ? 0 : 1 })

/** Number of steps that recoveries repeated. Recoveries from drills do not count. */
export const recomputedSteps = (figures: ReportFigures): number =>
  figures.Failures.RecomputedSteps + figures.PlannedStops.RecomputedSteps

/** Whether the range contains neither a job nor an idle node. */
export const isEmpty = (report: Report): boolean =>
  report.JobCount === 0 && Object.values(report.Total.IdleNodeSeconds).every((seconds) => seconds === 0)

/** One bar of a trend, for one time bucket. Its parts are stacked. A bucket without a value has no parts. */
export interface Bar {
  start: number
  end: number
  parts: number[]
}

/** Return the bars of a trend, one per time bucket. `parts`: the stacked parts of a bar. */
export const barsOf = (report: Report, parts: (figures: ReportFigures) => (number | undefined)[]): Bar[] =>
  report.Buckets.map(({ StartTime, EndTime, Figures }) => ({
    start: StartTime,
    end: EndTime,
    parts: parts(Figures).every((part) => part === undefined) ? [] : parts(Figures).map((part) => part ?? 0),
  }))

/**
 * A cost divided into three parts: work, failures, and idle nodes.
 *
 * The cost of failures is contained in the cost of jobs. The cost of jobs without it is the cost of work.
 */
export function costParts(figures: ReportFigures): (number | undefined)[] {
  const { CostUsd, SpareCostUsd, OtherIdleCostUsd } = figures
  if (CostUsd === undefined && SpareCostUsd === undefined && OtherIdleCostUsd === undefined) return [undefined]
  const failures = Math.min(figures.Failures.CostUsd ?? 0, CostUsd ?? 0)
  return [(CostUsd ?? 0) - failures, failures, (SpareCostUsd ?? 0) + (OtherIdleCostUsd ?? 0)]
}

/** Three round values from 0 to at least the greatest value, for an axis. */
export function axisOf(greatest: number, steps: readonly number[] = [1, 2, 5, 10]): [number, number, number] {
  if (greatest <= 0) return [0, 0.5, 1]
  const power = 10 ** Math.floor(Math.log10(greatest))
  const top = (steps.find((step) => step * power >= greatest * (1 - 1e-9)) ?? 10) * power
  return [0, top / 2, top]
}

const SPANS = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 1728000]

/** Like `axisOf`, but for seconds: the greatest value is a round number of seconds, minutes, hours or days. */
export function timeAxisOf(greatest: number): [number, number, number] {
  const top = greatest < 60 ? axisOf(greatest)[2] : (SPANS.find((each) => each >= greatest) ?? axisOf(greatest)[2])
  return [0, top / 2, top]
}

/**
 * Whether all buckets last an hour or less, so that their names need the hour.
 *
 * If buckets are days or weeks, only the first and the last can be so short, because the range cuts them.
 */
export const isHourly = (buckets: readonly { start: number; end: number }[]): boolean =>
  buckets.every((each) => each.end - each.start <= HOUR)

/** The start of a bucket in UTC: its day, or its day and hour if buckets last an hour. */
export function bucketWords(start: number, hasHours: boolean): string {
  const text = new Date(start * 1000).toLocaleDateString('en-GB', { timeZone: 'UTC', day: 'numeric', month: 'short' })
  return hasHours ? `${text} ${new Date(start * 1000).toISOString().slice(11, 16)}` : text
}

export const CSV_KINDS = ['buckets', 'projects', 'fleets', 'jobs', 'causes'] as const
export type CsvKind = (typeof CSV_KINDS)[number]
type Cell = string | number | undefined

const PLAIN = [
  'ProductiveSeconds',
  'EttrRatio',
  'EttrWithQueueRatio',
  'NodeSeconds',
  'RankSeconds',
  'UnpricedNodeSeconds',
  'CostUsd',
  'SpareCostUsd',
  'OtherIdleCostUsd',
  'MttfSeconds',
  'MttrSeconds',
] as const
const KINDS = ['Failures', 'PlannedStops', 'Drills'] as const
const SUMS = ['Count', 'RecoveredCount', 'RecoverySeconds', 'RecomputedSteps', 'CostUsd'] as const
const TIMES = Object.keys(TIME.buckets)

/** The rows of a report as CSV (RFC 4180), with the columns of `everstep reports export`. Empty without rows. */
export function csvOf(report: Report, kind: CsvKind): string {
  const found = rowsOf(report, kind)
  if (!found.length) return ''
  const names = Object.keys(found[0]!)
  return [names, ...found.map((row) => names.map((name) => row[name]))]
    .map((row) => `${row.map(quoted).join(',')}\r\n`)
    .join('')
}

function rowsOf(report: Report, kind: CsvKind): Record<string, Cell>[] {
  const time = (at: number) => new Date(at * 1000).toISOString().replace('.000Z', 'Z')
  switch (kind) {
    case 'buckets':
      return report.Buckets.map((each) => ({
        StartTime: time(each.StartTime),
        EndTime: time(each.EndTime),
        ...cellsOf(each.Figures),
      }))
    case 'projects':
      return report.Projects.map((each) => ({ Project: each.Project, ...cellsOf(each.Figures) }))
    case 'fleets':
      return report.Fleets.map((each) => ({ FleetName: each.FleetName, ...cellsOf(each.Figures) }))
    case 'jobs': {
      const jobs = report.Jobs.map(({ Figures, ...job }) => ({
        TrainingJobName: job.TrainingJobName,
        RunId: job.RunId,
        Project: job.Project,
        FleetName: job.FleetName,
        ...cellsOf(Figures),
      }))
      const none = { TrainingJobName: '(other jobs)', RunId: undefined, Project: undefined, FleetName: undefined }
      return report.OtherJobs ? [...jobs, { ...none, ...cellsOf(report.OtherJobs) }] : jobs
    }
    case 'causes':
      return report.Causes.map((each) => ({ Cause: each.Cause, Kind: each.Kind, ...sumsOf(each.Incidents, '') }))
  }
}

function cellsOf(figures: ReportFigures): Record<string, Cell> {
  return Object.assign(
    Object.fromEntries(PLAIN.map((name) => [name, figures[name]])),
    ...KINDS.map((kind) => sumsOf(figures[kind], kind)),
    Object.fromEntries(
      TIMES.map((name) => [`${name[0]!.toUpperCase()}${name.slice(1)}Seconds`, figures.AccountingSeconds[name] ?? 0]),
    ),
  ) as Record<string, Cell>
}

const sumsOf = (incidents: ReportIncidents, prefix: string): Record<string, Cell> =>
  Object.fromEntries(SUMS.map((name) => [`${prefix}${name}`, incidents[name]]))

/** Return a cell of a CSV file. A text that starts with `=`, `+`, `-` or `@`, also after spaces, would be a formula. */
export function quoted(cell: Cell): string {
  if (cell === undefined) return ''
  if (typeof cell === 'number') return String(cell)
  const text = /^\s*[=+\-@]/.test(cell) ? `'${cell}` : cell
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
}
