/** Checks a request before it is sent, field by field, with the rules of the server. Pure. */
import { SUBMIT } from '../words/submit'
import type { Draft } from './spec'

const NAME = /^[A-Za-z0-9](-?[A-Za-z0-9])*$/
const SOURCE_ID = /^[0-9a-f]{64}$/
const WORDS = SUBMIT.problems

const isWhole = (value: unknown, least: number): value is number =>
  typeof value === 'number' && Number.isInteger(value) && value >= least
const whole = (value: unknown, least: number): string | undefined =>
  value === undefined || isWhole(value, least) ? undefined : WORDS.whole(least)

/** Return a protection with parity over groups of `size` nodes and one copy, or without `size` the default copies. */
export function withParity(protection: Draft['Protection'], size: number | undefined): Draft['Protection'] {
  const { ParityGroupSize: _, Copies: __, ...other } = protection ?? {}
  return size === undefined ? other : { ...other, Copies: 1, ParityGroupSize: size }
}

/** Return the hyperparameters of a text with one `name=value` per line. Other lines are skipped. */
export function hyperparametersOf(text: string): Record<string, string> {
  const lines = text.split('\n').filter((line) => line.includes('='))
  const pairs = lines.map((line) => [line.slice(0, line.indexOf('=')), line.slice(line.indexOf('=') + 1)] as const)
  return Object.fromEntries(pairs.map(([name, value]) => [name.trim(), value.trim()]))
}

/** Return a sentence about the problem of each invalid field, by the field's name. */
export function problems(draft: Draft): Record<string, string> {
  const found: Record<string, string | undefined> = {
    TrainingJobName: nameProblem(String(draft.TrainingJobName ?? '')),
    Source: SOURCE_ID.test(String(draft.Source?.SourceId ?? '')) ? undefined : WORDS.source,
    EntryPoint: draft.EntryPoint ? undefined : WORDS.missing,
    NodeCount: draft.NodeCount === undefined ? WORDS.missing : whole(draft.NodeCount, 1),
    RanksPerNode: whole(draft.RanksPerNode, 1),
    Protection: protectionProblem(draft),
    CheckpointConfig: whole(draft.CheckpointConfig?.EverySteps, 0),
  }
  return Object.fromEntries(Object.entries(found).filter((each): each is [string, string] => each[1] !== undefined))
}

function nameProblem(name: string): string | undefined {
  if (!name) return WORDS.missing
  return name.length > 63 || !NAME.test(name) ? WORDS.name : undefined
}

function protectionProblem({ Protection, NodeCount }: Draft): string | undefined {
  const { Copies = 1, ParityGroupSize = 0 } = Protection ?? {}
  const wrong = whole(Protection?.Copies, 1)
  if (wrong !== undefined || !isWhole(NodeCount, 1)) return wrong
  if (Copies > NodeCount) return WORDS.copies(Copies, NodeCount)
  return ParityGroupSize > NodeCount ? WORDS.parity(ParityGroupSize, NodeCount) : undefined
}
