/** The timeline of one incident: milestones, events, log lines, stacks and notes, in the order of time. Pure. */
import type { Event, Incident, LogEvent, Milestone, Note } from '../contract'
import { INCIDENT } from '../words/incident'
import { sentence } from './format'
import { stacksOf } from './stacks'
import type { Tone } from './standing'

/** One entry of the timeline. Only a milestone has a `tone`. */
export interface Moment {
  key: string
  at: number
  title: string
  tone?: Tone
  event?: Event
  lines?: readonly LogEvent[]
  note?: Note
}

const MILESTONES = {
  Failed: 'bad',
  Detected: 'warn',
  Replaced: 'busy',
  Restored: 'good',
  Closed: 'idle',
} as const satisfies Record<Milestone['Kind'], Tone>

/** Types of events that are left out, because the timeline already shows their content. */
const REPEATED = new Set(['IncidentNoteCreated'])

/**
 * Return the moments of an incident, oldest first. At equal times, a milestone precedes an event.
 *
 * `events`: the job's events around the incident. `lines`: the last log lines before the failure, in the order of time.
 */
export function momentsOf(incident: Incident, events: readonly Event[], lines: readonly LogEvent[]): Moment[] {
  const words = INCIDENT.timeline
  const milestones: Moment[] = (incident.Milestones ?? []).map(({ Kind: key, Time: at, Description: title }) => ({
    key,
    at,
    title,
    tone: MILESTONES[key],
  }))
  const last = lines.at(-1)
  const printed: Moment[] = last
    ? [{ key: 'lines', at: Math.min(incident.FailedAt, last.Timestamp), title: words.lines(lines.length), lines }]
    : []
  const told = events
    .filter((event) => !REPEATED.has(event.Type))
    .map((event) => ({ key: `event-${event.EventId}`, at: event.Time, title: sentence(event.Message), event }))
  const notes = (incident.Notes ?? []).map((note) => ({
    key: `note-${note.NoteId}`,
    at: note.CreationTime,
    title: words.note(note.Author),
    note,
  }))
  return [...printed, ...milestones, ...told, ...notes].toSorted((a, b) => a.at - b.at)
}

/** Whether an event has the stacks of ranks. */
export const hasStacks = (event: Pick<Event, 'Detail'>): boolean => stacksOf(event).length > 0
