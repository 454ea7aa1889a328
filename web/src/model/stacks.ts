/** The stacks of ranks in the events of a hang. Equal stacks occur once. Entries without a stack are skipped. Pure. */
import type { Event } from '../contract'

export interface Stack {
  ranks: number[]
  text: string
}

export function stacksOf(event: Pick<Event, 'Detail'>): Stack[] {
  const told = (event.Detail as { stacks?: unknown } | null | undefined)?.stacks
  if (!Array.isArray(told)) return []
  const isRanks = (ranks: unknown) => Array.isArray(ranks) && ranks.every((rank) => typeof rank === 'number')
  return told.filter(
    (each: Partial<Stack> | null): each is Stack => typeof each?.text === 'string' && isRanks(each.ranks),
  )
}

/** Return the ranks as a short text: "ranks 0–3, 7". Consecutive ranks are joined. */
export function rankWords(ranks: readonly number[]): string {
  const sorted = [...ranks].sort((a, b) => a - b)
  const spans: [number, number][] = []
  for (const rank of sorted) {
    const last = spans.at(-1)
    if (last && rank <= last[1] + 1) last[1] = rank
    else spans.push([rank, rank])
  }
  const texts = spans.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`))
  return `${ranks.length === 1 ? 'rank' : 'ranks'} ${texts.join(', ')}`
}
