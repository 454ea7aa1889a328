/** Figures, ticks, smoothing and ranges of charts. Pure. */
import { binary, BINARY_UNITS, count } from './format'
import { lowerBound, type Axis, type Fault } from './metrics'

export type Zone = 'utc' | 'local'

/** The unit of a metric's values. `number` has no unit. */
export type Unit = 'number' | 'seconds' | 'bytes' | 'bytes/s' | 'percent'

/** Return a value with at most four significant digits and its unit: 2.317, 1.5 GiB/s, 93.2 %. */
export function figure(value: number | null | undefined, unit: Unit): string {
  if (value === null || value === undefined) return '–'
  switch (unit) {
    case 'bytes':
      return roundedBytes(value)
    case 'bytes/s':
      return `${roundedBytes(value)}/s`
    case 'seconds':
      return Math.abs(value) < 0.1 && value !== 0 ? `${rounded(value * 1000)} ms` : `${rounded(value)} s`
    case 'percent':
      return `${rounded(value)} %`
    default:
      return rounded(value)
  }
}

function roundedBytes(value: number): string {
  const [scaled, unit] = binary(value)
  return `${rounded(scaled)} ${unit}`
}

/** Return the possible distances of ticks on an axis up to `most` bytes: round numbers of KiB, MiB or a larger unit. */
export function binarySteps(most: number): number[] {
  const unit =
    1024 ** Math.max(0, Math.min(BINARY_UNITS.length - 1, Math.floor(Math.log(Math.max(1, most)) / Math.log(1024))))
  return [-3, -2, -1, 0, 1, 2, 3].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power * unit))
}

function rounded(value: number): string {
  const size = Math.abs(value)
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) {
    return value
      .toExponential(3)
      .replace(/\.?0+e/, 'e')
      .replace('e+', 'e')
  }
  if (size >= 10_000) return count(value)
  return Number(value.toPrecision(4)).toLocaleString('en-US', { maximumFractionDigits: 6 })
}

/** Return the offset of local time in seconds at a Unix time. 0 for UTC. */
export const offsetOf = (zone: Zone, at: number): number =>
  zone === 'utc' ? 0 : -60 * new Date(at * 1000).getTimezoneOffset()

const STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600,
]

/**
 * Return the ticks of a time axis: Unix seconds that are round in the zone's clock, such as whole minutes or hours.
 *
 * `most`: maximum number of intervals between ticks.
 */
export function timeTicks(from: number, to: number, most: number, zone: Zone): number[] {
  return roundTicks(from, to, most, { steps: STEPS, beyond: 86400, offset: offsetOf(zone, from) })
}

interface Round {
  /** Possible distances of ticks, rising. */
  steps: readonly number[]
  /** A larger distance is a multiple of this one. */
  beyond: number
  /** The ticks are multiples of their distance, minus this offset. */
  offset?: number
}

/** Return at most `most` + 1 round positions of an axis. */
export function roundTicks(from: number, to: number, most: number, { steps, beyond, offset = 0 }: Round): number[] {
  const step = steps.find((each) => (to - from) / each <= most) ?? Math.ceil((to - from) / most / beyond) * beyond
  const found: number[] = []
  for (let at = Math.ceil((from + offset) / step) * step - offset; at <= to; at += step) found.push(at)
  return found
}

/** Return the labels of time ticks. The first tick of each day shows the date. */
export function timeLabels(ticks: readonly number[], zone: Zone): string[] {
  const needsSeconds = ticks.some((at) => Math.round(at) % 60 !== 0)
  return ticks.map((at, index) => {
    const { day, date, time } = moment(at, zone)
    const isNewDay = index > 0 ? moment(ticks[index - 1]!, zone).day !== day : time === '00:00:00'
    return isNewDay ? date : time.slice(0, needsSeconds ? 8 : 5)
  })
}

function moment(at: number, zone: Zone): { day: string; date: string; time: string } {
  const shifted = new Date((at + offsetOf(zone, at)) * 1000)
  const iso = shifted.toISOString()
  const date = shifted.toLocaleDateString('en-GB', { day: 'numeric', month: 'short', timeZone: 'UTC' })
  return { day: iso.slice(0, 10), date, time: iso.slice(11, 19) }
}

/** Return a time with its date and zone: 1 Mar 12:00:05 UTC. */
export function momentWords(at: number, zone: Zone): string {
  const { date, time } = moment(at, zone)
  return `${date} ${time}${zone === 'utc' ? ' UTC' : ''}`
}

export const ELAPSED: readonly number[] = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800,
]

/** Return the ticks of an axis of elapsed time, at round numbers of seconds. */
export const elapsedTicks = (from: number, to: number, most: number): number[] =>
  roundTicks(from, to, most, { steps: ELAPSED, beyond: 604800 })

/** Return an elapsed time as 1:05:00, or as 3 d 02:00 from one day on. */
export function elapsedWords(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds))
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60]
  const two = (value: number) => String(value).padStart(2, '0')
  if (days) return `${days} d ${two(hours)}:${two(minutes)}`
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`
}

/** Return a position on an axis in words, for tooltips and tables. */
export function positionWords(axis: Axis, x: number, zone: Zone): string {
  if (axis === 'wall') return momentWords(x, zone)
  if (axis === 'elapsed') return `${elapsedWords(x)} after the start`
  return axis === 'tokens' ? `${compact(x)} tokens` : `step ${count(x)}`
}

/** Return a large number in at most five characters: 12.5k, 3.2M, 1.1T. */
export function compact(value: number): string {
  const names = ['', 'k', 'M', 'B', 'T']
  let [scaled, index] = [value, 0]
  while (Math.abs(scaled) >= 1000 && index < names.length - 1) [scaled, index] = [scaled / 1000, index + 1]
  return `${Number(scaled.toPrecision(3))}${names[index]}`
}

/**
 * Return the exponential moving average of a line, corrected for its start. Gaps stay gaps, and the average continues
 * after them.
 *
 * Source: the debiased average of TensorBoard and of W&B.
 *
 * Args: `weight` is the weight of the past, from 0 (no smoothing) to below 1.
 */
export function smoothed(values: readonly (number | null)[], weight: number): (number | null)[] {
  let [average, correction] = [0, 1]
  return values.map((value) => {
    if (value === null) return null
    average = average * weight + value * (1 - weight)
    correction *= weight
    return average / (1 - correction)
  })
}

/** Return the values that a logarithmic axis can show: null in place of zero and negative values. */
export const positive = (values: readonly (number | null)[]): (number | null)[] =>
  values.map((value) => (value !== null && value > 0 ? value : null))

export interface Line {
  x: readonly number[]
  y: readonly (number | null)[]
}

/**
 * Return several lines over one common axis, as uPlot needs them.
 *
 * null marks a gap of a line. undefined marks a position at which only other lines have a point.
 */
export function aligned(lines: readonly Line[]): { x: number[]; columns: (number | null | undefined)[][] } {
  if (lines.length === 1) return { x: [...lines[0]!.x], columns: [[...lines[0]!.y]] }
  const x = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b)
  const columns = lines.map((line) => {
    const found = new Array<number | null | undefined>(x.length).fill(undefined)
    line.x.forEach((at, index) => (found[lowerBound(x, at)] = line.y[index]!))
    return found
  })
  return { x, columns }
}

/** Return the index of the value in a rising list that is nearest to a position. -1 if the list is empty. */
export function nearestPlace(x: readonly number[], at: number): number {
  if (!x.length) return -1
  const after = Math.min(x.length - 1, lowerBound(x, at))
  return after > 0 && at - x[after - 1]! <= x[after]! - at ? after - 1 : after
}

/** A part of an axis that the user chose. */
export type Range = { from: number; to: number } | { last: number }

/** The ranges that a menu offers, by axis: seconds or steps before the newest point. */
export const PRESETS: Record<Axis, readonly number[]> = {
  wall: [900, 3600, 21600, 86400],
  elapsed: [900, 3600, 21600, 86400],
  step: [100, 1_000, 10_000],
  tokens: [],
}

/** Return the range that the query of the page's URL names. undefined: everything. */
export function rangeOf(search: URLSearchParams): Range | undefined {
  const number = (key: string) => (search.get(key) === null ? NaN : Number(search.get(key)))
  const [last, from, to] = ['last', 'from', 'to'].map(number)
  if (last! > 0) return { last: last! }
  return Number.isFinite(from) && Number.isFinite(to) && from! < to! ? { from: from!, to: to! } : undefined
}

/** Return the URL's parameters for a range. The caller removes parameters with an empty value from the URL. */
export function rangeParameters(range: Range | undefined, axis: Axis): Record<'last' | 'from' | 'to', string> {
  if (!range) return { last: '', from: '', to: '' }
  if ('last' in range) return { last: String(range.last), from: '', to: '' }
  const digits = axis === 'step' || axis === 'tokens' ? 0 : 1
  const to = Math.max(range.to, range.from + 10 ** -digits)
  return { last: '', from: range.from.toFixed(digits), to: to.toFixed(digits) }
}

/** Return the limits of an axis that shows a range of lines, or all of them. undefined: the lines have no points. */
export function limits(lines: readonly Line[], range: Range | undefined): [number, number] | undefined {
  if (range && 'from' in range) return [range.from, range.to]
  const firsts = lines.flatMap((line) => line.x.slice(0, 1))
  const lasts = lines.flatMap((line) => line.x.slice(-1))
  if (!firsts.length) return undefined
  const end = Math.max(...lasts)
  const start = Math.min(...firsts)
  const from = range ? Math.max(start, end - range.last) : start
  return from < end ? [from, end] : [from - 1, end + 1]
}

/** A mark on a chart: one failure, or several that are too close to mark separately. */
export interface Mark {
  /** Pixels from the left of the plot. */
  left: number
  faults: Fault[]
}

/** Return the marks of the failures that a plot of some width shows. Marks are at least `apart` pixels apart. */
export function marks(
  faults: readonly Fault[],
  [from, to]: readonly [number, number],
  width: number,
  apart: number,
): Mark[] {
  const found: Mark[] = []
  for (const fault of faults.toSorted((a, b) => a.from - b.from)) {
    if (fault.to < from || fault.from > to) continue
    const left = ((Math.max(from, fault.from) - from) / (to - from)) * width
    const before = found.at(-1)
    if (before && left - before.left < apart) before.faults.push(fault)
    else found.push({ left, faults: [fault] })
  }
  return found
}

/** Return evenly spaced indexes, including the first and the last, for a table of at most `most` points of a line. */
export function tablePlaces(length: number, most: number): number[] {
  if (length <= most) return Array.from({ length }, (_, index) => index)
  return Array.from({ length: most }, (_, index) => Math.round((index * (length - 1)) / (most - 1)))
}
