/** The sentence at the top of each page about fleets, and the settings of a fleet that a person can change. Pure. */
import type { Fleet, Node, UpdateFleetRequest } from '../contract'
import { FLEET, FLEETS } from '../words/fleets'
import { fleetFigures } from './figures'
import { count, percent } from './format'
import { nodeSteps } from './duty'
import { nodeNotices } from './nodes'
import type { Tone } from './standing'

interface Line {
  tone: Tone
  lead: string
  text?: string
}

/** Return the sentence at the top of the list of fleets. */
export function fleetsVerdict(fleets: readonly Fleet[]): Line {
  const words = FLEETS.verdict
  const frozen = fleets.filter(({ FleetStatus }) => FleetStatus === 'frozen').length
  const deleting = fleets.filter(({ FleetStatus }) => FleetStatus === 'deleting').length
  const missing = fleets
    .filter(({ FleetStatus }) => FleetStatus === 'active')
    .reduce((sum, fleet) => sum + fleetFigures(fleet).missingNodes, 0)
  const others = [missing ? words.waiting(missing) : '', deleting ? words.deleting(deleting) : ''].filter(Boolean)
  if (frozen) return { tone: 'warn', lead: words.frozen(frozen), text: others.join(' ') }
  if (others.length) return { tone: 'busy', lead: others[0]!, text: others.slice(1).join(' ') }
  return { tone: 'good', lead: words.all(fleets.length), text: words.complete }
}

/** Return the sentence at the top of a fleet's page: its state, and whether a person must decide something. */
export function fleetVerdict(fleet: Fleet, nodes: readonly Node[]): Line {
  const words = FLEET.verdict
  if (fleet.FleetStatus === 'frozen') return { tone: 'warn', lead: words.frozen, text: words.frozenText }
  if (fleet.FleetStatus === 'deleting') return { tone: 'busy', lead: words.deleting, text: words.nothing }
  const missing = fleetFigures(fleet).missingNodes
  const waits = missing ? words.waiting(missing) : ''
  const decisions = nodeSteps(nodes).length
  if (decisions) return { tone: 'warn', lead: words.held(decisions), text: waits }
  if (missing) return { tone: 'busy', lead: waits, text: words.nothing }
  return { tone: 'good', lead: words.good, text: nodeNotices(nodes).length ? undefined : words.nothing }
}

type Desired = Pick<Fleet, 'SpareCount' | 'SparePolicy' | 'MinNodeCount'>

/** Return the number of spares as text: a fixed number, or the probability that one is free. */
export const spares = ({ SpareCount, SparePolicy }: Desired): string =>
  SparePolicy === undefined ? count(SpareCount) : `one is free with ${percent(SparePolicy.Probability)}`

/** The values of the form. '': the field is empty. */
export interface FleetForm {
  spares: number | string
  least: number | string
}

/** Return the initial values of the form. The field of spares is empty for a fleet with a spare policy. */
export const formOf = (fleet: Desired): FleetForm => ({
  spares: fleet.SparePolicy === undefined ? fleet.SpareCount : '',
  least: fleet.MinNodeCount,
})

/** Return the changed fields of the form. A number in the field of spares replaces the fleet's spare policy. */
export function changesOf(fleet: Desired, form: FleetForm): Pick<UpdateFleetRequest, 'SpareCount' | 'MinNodeCount'> {
  const before = formOf(fleet)
  const isChanged = (key: keyof FleetForm) => form[key] !== '' && String(form[key]) !== String(before[key])
  return {
    ...(isChanged('spares') ? { SpareCount: Number(form.spares) } : {}),
    ...(isChanged('least') ? { MinNodeCount: Number(form.least) } : {}),
  }
}
