/** The sentence at the top of each page about fleets, and the settings of a fleet that a person can change. Pure. */
import type { Fleet, Node, UpdateFleetRequest } from '../contract'
import { toneOfDuty } from '../words/duty'
import { FLEET, FLEETS } from '../words/fleets'
import { fleetFigures } from './figures'
import { count, percent } from './format'
import { isPressing } from './duty'
import type { VerdictLine } from './standing'

/** Return the sentence at the top of the list of fleets. */
export function fleetsVerdict(fleets: readonly Fleet[]): VerdictLine {
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

/** Return the sentences at the top of a fleet's page: its duty, and the instances for which it waits. */
export function fleetVerdict(fleet: Fleet): VerdictLine {
  const words = FLEET.verdict
  const { Duty: duty } = fleet
  const missing = fleetFigures(fleet).missingNodes
  const waits = missing ? words.waiting(missing) : ''
  if (fleet.FleetStatus === 'deleting') return { tone: 'busy', lead: words.deleting, text: duty.Sentence }
  if (isPressing(duty)) return { tone: toneOfDuty(duty), lead: duty.Sentence, text: duty.Explanation ?? waits }
  return missing
    ? { tone: 'busy', lead: waits, text: duty.Sentence }
    : { tone: 'good', lead: words.good, text: duty.Sentence }
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

/** Return the numbers of nodes of a fleet that work for jobs, are spare or are held. */
export function capacityOf(fleet: Pick<Fleet, 'FleetName'>, nodes: readonly Node[]) {
  const mine = nodes.filter((node) => node.FleetName === fleet.FleetName && node.NodeStatus !== 'gone')
  const number = (status: Node['NodeStatus']) => mine.filter((node) => node.NodeStatus === status).length
  return { inUse: number('assigned'), spare: number('spare'), held: number('held') }
}
