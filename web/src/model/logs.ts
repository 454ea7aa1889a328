/** Lines of a job's log as a page holds them: merged over all ranks, bounded, each with a place that a link can name. Pure. */
import type { Incident, LogEvent } from '../contract'
import { pieces, plain, type Piece } from './ansi'

export interface Line {
  /** Running number in this page's memory; what is read before the first of them counts down. */
  number: number
  /** Unix time in milliseconds. */
  at: number
  generation: number
  /** Absent where a whole node is meant. */
  rank?: number
  nodeId: string
  stream: LogEvent['Stream']
  /** Without colours: what is searched. */
  text: string
  /** With them. */
  raw: string
}

/** A page holds so many at most; further back one goes by a link or the filter. */
export const MOST_LINES = 100_000
/** So many are let go at once, so that it does not happen with each line. */
const LET_GO = 20_000

const lineOf = (event: LogEvent, number: number): Line => ({
  number,
  at: Math.round(event.Timestamp * 1000),
  generation: event.Generation,
  rank: event.Rank,
  nodeId: event.NodeId,
  stream: event.Stream,
  text: plain(event.Message),
  raw: event.Message,
})

/** Lines that follow on those that are held; the oldest are let go beyond the limit, those of one moment together: they are found again by its time. */
export function appended(held: readonly Line[], events: readonly LogEvent[]): { lines: Line[]; isCut: boolean } {
  const next = (held.at(-1)?.number ?? -1) + 1
  const lines = [...held, ...events.map((event, index) => lineOf(event, next + index))]
  if (lines.length <= MOST_LINES) return { lines, isCut: false }
  const most = lines.length - MOST_LINES + LET_GO
  const first = lines.findIndex((line, index) => index >= most && line.at !== lines[index - 1]!.at)
  return { lines: lines.slice(first < 0 ? most : first), isCut: true }
}

export function prepended(held: readonly Line[], events: readonly LogEvent[]): Line[] {
  const first = held[0]?.number ?? 0
  return [...events.map((event, index) => lineOf(event, first - events.length + index)), ...held]
}

export const look = (line: Line): Piece[] => pieces(line.raw)

/** What a line that tells of an end looks like. */
const FAILURE = /traceback|error\b|exception|fatal|killed|segmentation|out of memory|\bnan\b|assert/i
export const tellsOfFailure = (line: Line): boolean => line.stream === 'gap' || FAILURE.test(line.text)

/** The numbers of the lines that have a text in them, in upper or lower case. */
export function hits(lines: readonly Line[], text: string): number[] {
  const wanted = text.toLowerCase()
  return wanted ? lines.filter((line) => line.text.toLowerCase().includes(wanted)).map((line) => line.number) : []
}

/** Which of them is looked at: the one that was, for as long as it is one and whatever is read before or after it; else the newest. */
export const hitOf = (found: readonly number[], before: number | undefined): number | undefined => (before !== undefined && found.includes(before) ? before : found.at(-1))

const SEPARATOR = '~'

/** A line's place, the same for everybody who reads this log: launch, time, rank, and which of those that these have in common. */
export function placeOf(line: Line, lines: readonly Line[]): string {
  const alike = lines.filter((each) => each.at === line.at && isOf(each, line.generation, line.rank))
  return [line.generation, line.at, line.rank ?? '', alike.findIndex((each) => each.number === line.number)].join(SEPARATOR)
}

export interface Place {
  generation: number
  at: number
  rank?: number
  nth: number
}

export function readPlace(text: string): Place | undefined {
  const match = /^(\d{1,9})~(\d{1,15})~(\d{0,9})~(\d{1,6})$/.exec(text)
  return match ? { generation: Number(match[1]), at: Number(match[2]), rank: match[3] ? Number(match[3]) : undefined, nth: Number(match[4]) } : undefined
}

const isOf = (line: Line, generation: number, rank: number | undefined) => line.generation === generation && line.rank === rank

/** The line at a place, or the nearest one before it: lines may have been lost since the link was made. */
export function lineAt(place: Place, lines: readonly Line[]): Line | undefined {
  const alike = lines.filter((line) => line.at === place.at && isOf(line, place.generation, place.rank))
  return alike[place.nth] ?? alike.at(-1) ?? lines.findLast((line) => line.generation === place.generation && line.at <= place.at) ?? lines[0]
}

/** How long after a failure its own lines may come: agents read what is printed with some delay. */
const AFTER_MS = 2_000

/** Where somebody looks who wants to know why an incident came: the last line of its launch that tells of it, up to when it failed. */
export function failureLine(incident: Pick<Incident, 'FailedAt' | 'GenerationBefore'>, lines: readonly Line[]): Line | undefined {
  const mine = lines.filter((line) => line.generation === incident.GenerationBefore && line.at <= incident.FailedAt * 1000 + AFTER_MS)
  return mine.findLast((line) => line.stream !== 'gap' && tellsOfFailure(line)) ?? mine.findLast(tellsOfFailure) ?? mine.at(-1)
}

/** As it is downloaded: one line a line, with when and who. */
export const asText = (line: Line): string => `${new Date(line.at).toISOString()} launch ${line.generation} ${line.rank === undefined ? line.nodeId : `rank ${line.rank}`} ${line.stream}: ${line.text}\n`
