/** What the search box finds: pages, objects and the actions that the role permits. Pure. */
import type { Fleet, Incident, Node, TrainingJobSummary } from '../contract'
import { PALETTE } from '../words/palette'
import { SHELL } from '../words/shell'
import { addressesOf } from './jobs'
import { actionsOf } from './nodes'
import { causeTitle } from './causes'
import { PLACES, SUBMIT } from './places'
import { isOver, statusOf } from './standing'

export type Scheme = 'auto' | 'light' | 'dark'
export type Action =
  | { type: 'pause' | 'resume' | 'stop'; job: TrainingJobSummary; address: string }
  | { type: 'drain'; node: Node }
  | { type: 'theme'; scheme: Scheme }
  | { type: 'keys' }
  | { type: 'sign-out' }

/** An entry opens a page, or it runs an action. */
export type Entry = { id: string; label: string; kind: string } & (
  { to: string; action?: undefined } | { to?: undefined; action: Action }
)

export interface Lists {
  jobs: readonly TrainingJobSummary[]
  fleets: readonly Fleet[]
  /** The oldest first. */
  incidents: readonly Incident[]
  nodes: readonly Node[]
}

/** What the role of the session permits. */
export interface Permissions {
  mayRun: boolean
  isAdmin: boolean
}

/** Return all entries in the order in which the search box lists them. */
export function entriesOf({ jobs, fleets, incidents, nodes }: Lists, { mayRun, isAdmin }: Permissions): Entry[] {
  const kinds = PALETTE.kinds
  const addressOf = addressesOf(jobs)
  const page = (to: string, label: string, kind: string = kinds.page): Entry => ({ id: to, label, kind, to })
  return [
    ...[...PLACES, ...(mayRun ? [SUBMIT] : [])].map(({ name, to }) => page(to, SHELL.places[name])),
    page('/settings', SHELL.places.settings),
    ...jobs.map((job) =>
      page(
        `/jobs/${encodeURIComponent(addressOf(job))}`,
        job.TrainingJobName,
        kinds.job(statusOf(job.SecondaryStatus).word),
      ),
    ),
    ...fleets.map(({ FleetName }) => page(`/fleets/${encodeURIComponent(FleetName)}`, FleetName, kinds.fleet)),
    ...incidents
      .toReversed()
      .map((incident) =>
        page(
          `/incidents/${encodeURIComponent(incident.IncidentId)}`,
          incident.IncidentId,
          kinds.incident(causeTitle(incident.Cause)),
        ),
      ),
    ...nodes.map((node) =>
      page(`/fleets/${encodeURIComponent(node.FleetName)}#${node.NodeId}`, node.NodeId, kinds.node(node.FleetName)),
    ),
    ...(mayRun ? jobs.flatMap((job) => jobActions(job, addressOf(job))) : []),
    ...(isAdmin ? nodes.flatMap(nodeActions) : []),
    ...ownActions(),
  ]
}

const action = (label: string, run: Action): Entry => ({
  id: `action ${label}`,
  label,
  kind: PALETTE.kinds.action,
  action: run,
})

function jobActions(job: TrainingJobSummary, address: string): Entry[] {
  if (isOver(job) || job.TrainingJobStatus === 'Stopping') return []
  const words = PALETTE.actions
  const isPaused = job.SecondaryStatus === 'Paused' || job.SecondaryStatus === 'Pausing'
  const turn = isPaused ? 'resume' : 'pause'
  return [
    action(words[turn](job.TrainingJobName), { type: turn, job, address }),
    action(words.stop(job.TrainingJobName), { type: 'stop', job, address }),
  ]
}

function nodeActions(node: Node): Entry[] {
  const canDrain = actionsOf(node).some(({ operation }) => operation === 'DrainNode')
  return canDrain ? [action(PALETTE.actions.drain(node.NodeId), { type: 'drain', node })] : []
}

function ownActions(): Entry[] {
  const words = PALETTE.actions
  const schemes: Scheme[] = ['light', 'dark', 'auto']
  return [
    ...schemes.map((scheme) => action(words.theme[scheme], { type: 'theme', scheme })),
    action(words.keys, { type: 'keys' }),
    action(words.signOut, { type: 'sign-out' }),
  ]
}

/**
 * Return the first entries that contain every word of the text.
 *
 * If the text has several words, entries that begin with it come first, because such a text usually names an action.
 */
export function matching(entries: readonly Entry[], text: string, limit: number): Entry[] {
  const wanted = text.trim().toLowerCase()
  const parts = wanted.split(/\s+/).filter(Boolean)
  const matches = ({ label, kind }: Entry) => parts.every((part) => `${label} ${kind}`.toLowerCase().includes(part))
  const begins = ({ label }: Entry) => parts.length > 1 && label.toLowerCase().startsWith(wanted)
  const found = entries.filter(matches)
  return [...found.filter(begins), ...found.filter((entry) => !begins(entry))].slice(0, limit)
}
