/** Formats numbers, durations and times for people. Pure: the current time is an argument. */

/** Format a whole number: 1204 → 1,204. */
export const count = (value: number): string => value.toLocaleString('en-US', { maximumFractionDigits: 0 })

/** Format a duration: 0.4 s, 12 s, 3 min 05 s, 2 h 10 min, 4 d 3 h. */
export function duration(seconds: number): string {
  const s = Math.max(0, seconds)
  if (s > 0 && s < 0.05) return '< 0.1 s'
  if (s < 9.95) return `${s.toFixed(1)} s`
  const whole = Math.round(s)
  if (whole < 60) return `${whole} s`
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, '0')} s`
  const minutes = Math.round(s / 60)
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')} min`
  const hours = Math.round(s / 3600)
  return `${Math.floor(hours / 24)} d ${hours % 24} h`
}

/** Return how long ago `at` was: just now, 12 s ago. */
export function ago(at: number, now: number): string {
  const passed = now - at
  if (passed < -1) return `in ${duration(-passed)}`
  return passed < 1 ? 'just now' : `${coarse(passed)} ago`
}

/** Return the time until a moment: "in 12 min". */
export function soon(at: number, now: number): string {
  const seconds = Math.max(0, Math.round(at - now))
  return `in ${coarse(seconds < 60 ? seconds : Math.round(seconds / 60) * 60)}`
}

function coarse(seconds: number): string {
  if (seconds < 60) return `${Math.floor(seconds)} s`
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h`
  return `${Math.floor(seconds / 86400)} d`
}

/** Format Unix seconds in UTC: 2026-03-01 12:00:05 UTC. */
export const utc = (at: number): string => `${new Date(at * 1000).toISOString().slice(0, 19).replace('T', ' ')} UTC`

/** Return a moment in UTC and, if it differs, in the reader's time zone. */
export const moment = (at: number, zone?: string): string => [utc(at), local(at, zone)].filter(Boolean).join(' · ')

/** Return the time of day in UTC: 12:00:05. */
export const clock = (at: number): string => new Date(at * 1000).toISOString().slice(11, 19)

/** Return the time of day in UTC without seconds: 12:00. */
export const minute = (at: number): string => clock(at).slice(0, 5)

/**
 * Return a moment in the reader's time zone: "2026-03-01 13:00:05 GMT+1". Empty where the zone's time is UTC.
 *
 * `zone`: name of the time zone; by default the browser's.
 */
export function local(at: number, zone?: string): string {
  const date = new Date(at * 1000)
  const day = date.toLocaleString('sv-SE', { timeZone: zone })
  if (day === utc(at).slice(0, 19)) return ''
  const parts = new Intl.DateTimeFormat('en-GB', { timeZone: zone, timeZoneName: 'short' }).formatToParts(date)
  return `${day} ${parts.find((part) => part.type === 'timeZoneName')?.value ?? ''}`.trim()
}

/** Format a number of bytes: 1.5 GiB. */
export function bytes(value: number): string {
  const [scaled, unit] = binary(value)
  return `${unit === 'B' ? scaled : scaled.toFixed(1)} ${unit}`
}

export const BINARY_UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'] as const

/** Return a number of bytes in the largest unit in which it is at least 1. */
export function binary(value: number): [scaled: number, unit: string] {
  let [scaled, index] = [value, 0]
  while (Math.abs(scaled) >= 1024 && index < BINARY_UNITS.length - 1) [scaled, index] = [scaled / 1024, index + 1]
  return [scaled, BINARY_UNITS[index]!]
}

/** Format an amount in US dollars: $1,204.50. */
export function dollars(usd: number): string {
  return usd.toLocaleString('en-US', { style: 'currency', currency: 'USD' })
}

/** Format a probability, and never round it up to 100 %: 93 %, 99.98 %, 100 %. */
export function percent(ratio: number): string {
  if (ratio >= 1) return '100 %'
  if (ratio <= 0) return '0 %'
  for (const digits of [0, 1, 2, 3, 4]) {
    const text = (ratio * 100).toFixed(digits)
    if (Number(text) < 100 && Number(text) > 0) return `${text} %`
  }
  return ratio > 0.5 ? '> 99.9999 %' : '< 0.0001 %'
}

/** Return a number with its noun: 1 step, 2 steps. */
export const plural = (value: number, noun: string, nouns = `${noun}s`): string =>
  `${count(value)} ${value === 1 ? noun : nouns}`

/** Return a text as a sentence: with a capital first letter and a full stop. Empty for an empty text. */
export const sentence = (text: string): string => {
  const trimmed = text.trim()
  if (!trimmed) return ''
  const first = /^i-[0-9a-f]{8}/.test(trimmed) ? 'i' : trimmed[0]!.toUpperCase() // the id of an instance is no word
  return first + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? '' : '.')
}

/** Return the first and the last line of a text as sentences, for example of a failure with its traceback. */
export function headline(text: string): string {
  const lines = text
    .split('\n')
    .map((line) => line.trim())
    .filter(Boolean)
  return lines.length < 2 ? sentence(lines[0] ?? '') : `${sentence(lines[0]!)} ${sentence(lines.at(-1)!)}`
}

/** Return a text with a capital first letter. */
export const capitalized = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1)

/** Return the words of an identifier: disk_full → disk full, JobStateChanged → Job state changed. */
export const words = (identifier: string): string =>
  identifier.replace(/_/g, ' ').replace(/(?<=[a-z])[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`)
