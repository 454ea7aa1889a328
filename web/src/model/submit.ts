/** What is wrong with a request before it is sent, field by field, in the words of the server. Pure. */
import type { Draft } from './spec'

const NAME = /^[A-Za-z0-9](-?[A-Za-z0-9])*$/

const whole = (value: unknown, least: number): string | undefined =>
  value === undefined ? undefined : typeof value === 'number' && Number.isInteger(value) && value >= least ? undefined : `must be a whole number, at least ${least}`

/** The protection with parity over groups of `size` nodes, which keeps one copy; undefined: the default number of copies. */
export function withParity(protection: Draft['Protection'], size: number | undefined): Draft['Protection'] {
  const { ParityGroupSize: _, Copies: __, ...other } = protection ?? {}
  return size === undefined ? other : { ...other, Copies: 1, ParityGroupSize: size }
}

export function problems(draft: Draft): Record<string, string> {
  const name = String(draft.TrainingJobName ?? '')
  const found: Record<string, string | undefined> = {
    TrainingJobName: !name ? 'is missing' : name.length > 63 || !NAME.test(name) ? 'must be 1 to 63 letters, digits and single hyphens' : undefined,
    Source: /^[0-9a-f]{64}$/.test(String(draft.Source?.SourceId ?? '')) ? undefined : 'must be the id of an uploaded source: 64 hexadecimal digits',
    EntryPoint: draft.EntryPoint ? undefined : 'is missing',
    NodeCount: draft.NodeCount === undefined ? 'is missing' : whole(draft.NodeCount, 1),
    RanksPerNode: whole(draft.RanksPerNode, 1),
    Protection:
      whole(draft.Protection?.Copies, 1) ??
      (typeof draft.NodeCount === 'number' && whole(draft.NodeCount, 1) === undefined && (draft.Protection?.Copies ?? 1) > draft.NodeCount ? `cannot be more copies than nodes: ${draft.Protection?.Copies} on ${draft.NodeCount}` : undefined) ??
      ((draft.Protection?.ParityGroupSize ?? 0) > (draft.NodeCount ?? 0) && draft.NodeCount !== undefined ? `groups of ${draft.Protection?.ParityGroupSize} nodes need as many nodes: NodeCount is ${draft.NodeCount}` : undefined),
    CheckpointConfig: whole(draft.CheckpointConfig?.EverySteps, 0),
  }
  return Object.fromEntries(Object.entries(found).filter((each): each is [string, string] => each[1] !== undefined))
}
