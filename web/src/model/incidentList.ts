/** The list of incidents: its filters and its order. Pure. */
import type { Incident } from '../contract'
import { causeTitle } from './causes'

/** The filter of the list. An incident must match every field that is not empty. */
export interface IncidentFilter {
  text: string
  state: '' | 'open' | 'closed'
  cause: string
  /** `NO_OWNER` selects incidents without an owner. */
  owner: string
  project: string
}

/** No owner has this name, because the service removes spaces around names. */
export const NO_OWNER = ' '

export function filtered(incidents: readonly Incident[], filter: IncidentFilter): Incident[] {
  const text = filter.text.trim().toLowerCase()
  return incidents.filter((each) => {
    if (filter.state && (filter.state === 'open') !== (each.ClosedAt === undefined)) return false
    if (filter.cause && each.Cause !== filter.cause) return false
    if (filter.owner && (each.Owner ?? NO_OWNER) !== filter.owner) return false
    if (filter.project && each.Project !== filter.project) return false
    const nodes = [...(each.FaultedInstanceIds ?? []), ...(each.InstanceIds ?? [])]
    const cause = [each.Cause, causeTitle(each.Cause)]
    const words = [each.TrainingJobName, each.Headline, ...cause, each.IncidentId, each.Owner ?? '', ...nodes]
    return words.join(' ').toLowerCase().includes(text)
  })
}

/** Return the urgency of an incident: 0 open and not acknowledged, 1 open and acknowledged, 2 closed. */
const trouble = (incident: Incident): number =>
  incident.ClosedAt !== undefined ? 2 : incident.AcknowledgementTime === undefined ? 0 : 1

/** Return the incidents, the most urgent first, and the newest first among equally urgent incidents. */
export const troubleFirst = (incidents: readonly Incident[]): Incident[] =>
  incidents.toSorted((a, b) => trouble(a) - trouble(b) || b.OpenedAt - a.OpenedAt)

/** Return the values that a field has in these incidents, each once, in alphabetical order. */
export const valuesOf = (incidents: readonly Incident[], field: 'Cause' | 'Owner' | 'Project'): string[] =>
  [...new Set(incidents.flatMap((each): string[] => (each[field] === undefined ? [] : [each[field]])))].toSorted()
