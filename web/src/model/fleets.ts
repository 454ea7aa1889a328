/** How many spares a fleet keeps, and what somebody changes of its figures. Pure. */
import type { Fleet, UpdateFleetRequest } from '../contract'
import { count, percent } from './format'

type Wanted = Pick<Fleet, 'SpareCount' | 'SparePolicy' | 'MinNodeCount'>

/** A count that somebody said, or what follows from how probable a free one has to be. */
export const spares = ({ SpareCount, SparePolicy }: Wanted): string => (SparePolicy === undefined ? count(SpareCount) : `so many that one is free with ${percent(SparePolicy.Probability)}`)

/** What the fields of a form hold; '': nothing. */
export interface Figures {
  spares: number | string
  least: number | string
}

/** As the form begins: a policy has no count. */
export const figuresOf = (fleet: Wanted): Figures => ({ spares: fleet.SparePolicy === undefined ? fleet.SpareCount : '', least: fleet.MinNodeCount })

/** Only what differs: a count of spares, though it be the same, ends the policy that counts them. */
export function changesOf(fleet: Wanted, typed: Figures): Pick<UpdateFleetRequest, 'SpareCount' | 'MinNodeCount'> {
  const before = figuresOf(fleet)
  const changed = (key: keyof Figures) => typed[key] !== '' && String(typed[key]) !== String(before[key])
  return { ...(changed('spares') ? { SpareCount: Number(typed.spares) } : {}), ...(changed('least') ? { MinNodeCount: Number(typed.least) } : {}) }
}
