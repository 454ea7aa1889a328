/** What a dry run says would become of a job, in words. Pure. */
import type { TrainingJobPlan } from '../contract'
import { bytes, count, dollars, duration, percent, plural, sentence } from './format'
import type { Statement } from './verdict'

export interface Planned {
  start: Statement
  facts: [string, string][]
}

const LOSSES: Record<number, string> = { 1: 'any one node', 2: 'any two', 3: 'any three' }

export function planned(plan: TrainingJobPlan): Planned {
  const launch = plan.NodesToLaunch > 0 ? ` ${sentence(`the fleet would bring ${plural(plan.NodesToLaunch, 'instance')}`)}` : ''
  const free = `${plural(plan.FreeNodeCount, 'node')} of ${plan.FleetName} ${plan.FreeNodeCount === 1 ? 'is' : 'are'} free, and it needs ${count(plan.NodeCount)}.`
  const behind = (plan.QueuedBehind ?? []).length ? ` Ahead of it: ${plan.QueuedBehind.join(', ')}.` : ''
  const start: Statement = plan.CanStartNow
    ? { tone: 'good', title: 'It would start at once', text: `${free}${launch}` }
    : {
        tone: 'busy',
        title: plan.QueuePosition === undefined ? 'It would wait for nodes' : `It would be number ${plan.QueuePosition} in the queue`,
        text: `${sentence(plan.WaitsFor ?? '')} ${free}${behind}${launch}`.trim(),
      }
  const odds = (plan.RecoveryOdds ?? []).map((each) => `${LOSSES[each.LostNodes] ?? `any ${each.LostNodes}`}: ${each.Probability >= 1 ? 'always' : `in ${percent(each.Probability)} of the cases`}`)
  const facts: [string, string | undefined][] = [
    ['Fleet', plan.FleetName],
    ['Ranks', `${count(plan.WorldSize)}: ${plural(plan.NodeCount, 'node')} with ${count(plan.RanksPerNode)} each`],
    plan.ParityGroupSize === undefined ? ['Copies in memory', count(plan.Copies)] : ['Parity in memory', `groups of ${plan.ParityGroupSize} nodes`],
    plan.CopiesMemoryRatio === undefined ? ['Memory of a node', undefined] : ['Memory of a node', `${plan.MemoryRatio.toFixed(2)} × the state of its ranks; two copies: ${plan.CopiesMemoryRatio.toFixed(2)} ×`],
    ['A loss is survived from memory', odds.join('; ') || undefined],
    ['State of a rank', plan.LargestShardBytes === undefined ? undefined : `at most ${bytes(plan.LargestShardBytes)}: ${plural(plan.SlotsPerNode, 'slot')} in ${bytes(plan.NodeMemoryBytes ?? 0)} of a node`],
    ['Price', plan.CostUsdPerHour === undefined ? undefined : `${dollars(plan.CostUsdPerHour)}/h`],
    ['At most', plan.MostCostUsd === undefined ? undefined : dollars(plan.MostCostUsd)],
    ['A failure', plan.ExpectedMttfSeconds === undefined ? undefined : `about every ${duration(plan.ExpectedMttfSeconds)}, as this fleet has been`],
    ['A recovery', plan.ExpectedRecoverySeconds === undefined ? undefined : `about ${duration(plan.ExpectedRecoverySeconds)}`],
    ['Expected ETTR', plan.ExpectedEttrRatio === undefined ? undefined : percent(plan.ExpectedEttrRatio)],
  ]
  return { start, facts: facts.filter((each): each is [string, string] => each[1] !== undefined) }
}
