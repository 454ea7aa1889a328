/** Lines of a job's log in a page: merged over all ranks, limited in number, each with an address. Pure. */
import type { Incident, LogEvent } from '../contract'
import { pieces, plain, type Piece } from './ansi'

export interface Line {
  /** Position of the line relative to the first line that this page has read, which is 0. Older lines are negative. */
  number: number
  /** Unix time in milliseconds. */
  at: number
  generation: number
  /** Absent for a line about a whole node. */
  rank?: number
  nodeId: string
  stream: LogEvent['Stream']
  /** The line without color codes, for the search. */
  text: string
  /** The line with color codes. */
  raw: string
  /** True if the line overwrites the previous line of the same writer that is moving, like a progress bar. */
  isMoving: boolean
}

/** Maximum number of lines that a page holds. A link or a filter can load older lines. */
export const MOST_LINES = 100_000
/** A full page drops this many lines at once, so that it does not drop one with each new line. */
const DROPPED_LINES = 20_000

const lineOf = (event: LogEvent, number: number): Line => ({
  isMoving: event.Overwrites ?? false,
  number,
  at: Math.round(event.Timestamp * 1000),
  generation: event.Generation,
  rank: event.Rank,
  nodeId: event.NodeId,
  stream: event.Stream,
  text: plain(event.Message),
  raw: event.Message,
})

/** Return the lines without the states of moving lines that a later line overwrites. */
function settled(lines: readonly Line[]): Line[] {
  const overwritten = new Set<string>()
  const kept: Line[] = []
  for (const line of lines.toReversed()) {
    const writer = `${line.nodeId} ${line.rank ?? ''} ${line.stream}`
    if (!line.isMoving || !overwritten.has(writer)) kept.push(line)
    if (line.isMoving) overwritten.add(writer)
    else overwritten.delete(writer)
  }
  return kept.reverse()
}

/**
 * Return the held lines with the lines of `events` appended.
 *
 * Above `MOST_LINES`, the oldest lines are dropped. Lines with equal times are dropped together, because the page
 * requests older lines by the time of the oldest held line.
 */
export function appended(held: readonly Line[], events: readonly LogEvent[]): { lines: Line[]; isCut: boolean } {
  const next = (held.at(-1)?.number ?? -1) + 1
  const lines = settled([...held, ...events.map((event, index) => lineOf(event, next + index))])
  if (lines.length <= MOST_LINES) return { lines, isCut: false }
  const most = lines.length - MOST_LINES + DROPPED_LINES
  const first = lines.findIndex((line, index) => index >= most && line.at !== lines[index - 1]!.at)
  return { lines: lines.slice(first < 0 ? most : first), isCut: true }
}

/** Return the held lines with the lines of `events` before them. */
export function prepended(held: readonly Line[], events: readonly LogEvent[]): Line[] {
  const first = held[0]?.number ?? 0
  return settled([...events.map((event, index) => lineOf(event, first - events.length + index)), ...held])
}

/** Return the pieces of a line, each with its text and its CSS classes. */
export const look = (line: Line): Piece[] => pieces(line.raw)

/** Words by which a line is recognized as a line about a failure. */
const FAILURE = /traceback|error\b|exception|fatal|killed|segmentation|out of memory|\bnan\b|assert/i
export const tellsOfFailure = (line: Line): boolean => line.stream === 'gap' || FAILURE.test(line.text)

/** Return the `number` of each line that contains `text`, ignoring case. */
export function hits(lines: readonly Line[], text: string): number[] {
  const wanted = text.toLowerCase()
  return wanted ? lines.filter((line) => line.text.toLowerCase().includes(wanted)).map((line) => line.number) : []
}

/** Return the number of the current match: the previous match if it still matches, or else the newest match. */
export const hitOf = (matches: readonly number[], before: number | undefined): number | undefined =>
  before !== undefined && matches.includes(before) ? before : matches.at(-1)

const SEPARATOR = '~'

/** Return a line's address, equal in every browser: launch, time, rank, and position among lines with equal values. */
export function placeOf(line: Line, lines: readonly Line[]): string {
  const alike = lines.filter((each) => each.at === line.at && isOf(each, line.generation, line.rank))
  const nth = alike.findIndex((each) => each.number === line.number)
  return [line.generation, line.at, line.rank ?? '', nth].join(SEPARATOR)
}

export interface Place {
  generation: number
  at: number
  rank?: number
  nth: number
}

export function readPlace(text: string): Place | undefined {
  const match = /^(\d{1,9})~(\d{1,15})~(\d{0,9})~(\d{1,6})$/.exec(text)
  if (!match) return undefined
  const rank = match[3] ? Number(match[3]) : undefined
  return { generation: Number(match[1]), at: Number(match[2]), rank, nth: Number(match[4]) }
}

const isOf = (line: Line, generation: number, rank: number | undefined) =>
  line.generation === generation && line.rank === rank

/** Return the line with an address. If retention has deleted the line, return the nearest earlier line. */
export function lineAt(place: Place, lines: readonly Line[]): Line | undefined {
  const alike = lines.filter((line) => line.at === place.at && isOf(line, place.generation, place.rank))
  const before = lines.findLast((line) => line.generation === place.generation && line.at <= place.at)
  return alike[place.nth] ?? alike.at(-1) ?? before ?? lines[0]
}

/** Milliseconds by which the times of a failure's lines may follow the failure: agents read the output with a delay. */
const AFTER_MS = 2_000

/** Return the line that explains an incident: the last line about a failure in its launch, up to the failure. */
export function failureLine(
  { FailedAt, GenerationBefore }: Pick<Incident, 'FailedAt' | 'GenerationBefore'>,
  lines: readonly Line[],
): Line | undefined {
  const end = FailedAt * 1000 + AFTER_MS
  const mine = lines.filter((line) => line.generation === GenerationBefore && line.at <= end)
  const printed = mine.findLast((line) => line.stream !== 'gap' && tellsOfFailure(line))
  return printed ?? mine.findLast(tellsOfFailure) ?? mine.at(-1)
}

/** Return a line of the downloaded file: time, launch, rank or node, stream and text. */
export const asText = ({ at, generation, rank, nodeId, stream, text }: Line): string =>
  `${new Date(at).toISOString()} launch ${generation} ` +
  `${rank === undefined ? nodeId : `rank ${rank}`} ${stream}: ${text}\n`
