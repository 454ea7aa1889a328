/** Where ranks stood when they were looked at: what the events of a hang carry, each stack once. Pure; what is no stack is left out. */
import type { Event } from '../contract'

export interface Stack {
  ranks: number[]
  text: string
}

export function stacksOf(event: Pick<Event, 'Detail'>): Stack[] {
  const told = (event.Detail as { stacks?: unknown } | null | undefined)?.stacks
  if (!Array.isArray(told)) return []
  return told.filter((each: Partial<Stack> | null): each is Stack => typeof each?.text === 'string' && Array.isArray(each.ranks) && each.ranks.every((rank) => typeof rank === 'number'))
}

/** 0–3, 7: neighbours are joined, so that a thousand ranks are a line. */
export function rankWords(ranks: readonly number[]): string {
  const sorted = [...ranks].sort((a, b) => a - b)
  const spans: [number, number][] = []
  for (const rank of sorted) {
    const last = spans.at(-1)
    if (last && rank <= last[1] + 1) last[1] = rank
    else spans.push([rank, rank])
  }
  return `${ranks.length === 1 ? 'rank' : 'ranks'} ${spans.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(', ')}`
}
