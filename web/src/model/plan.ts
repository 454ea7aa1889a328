/** Describes the plan that a dry run of a job's submission returns. Pure. */
import type { TrainingJobPlan } from '../contract'
import { PLAN } from '../words/submit'
import { bytes, count, dollars, duration, percent, plural, sentence } from './format'
import type { Statement } from './verdict'

/** Return whether the job would start, and each fact that the API returns. A new fleet has no MTTF yet, for example. */
export function planned(plan: TrainingJobPlan) {
  const facts = factsOf(plan).filter((fact): fact is [string, string] => fact[1] !== undefined)
  return { start: startOf(plan), facts }
}

function startOf(plan: TrainingJobPlan): Statement {
  const isOne = plan.FreeNodeCount === 1
  const free = PLAN.free(plural(plan.FreeNodeCount, 'node'), plan.FleetName, isOne, count(plan.NodeCount))
  const launch = plan.NodesToLaunch > 0 ? PLAN.launch(plural(plan.NodesToLaunch, 'instance')) : ''
  const joined = (...texts: string[]) => texts.filter(Boolean).join(' ')
  if (plan.CanStartNow) return { tone: 'good', title: PLAN.start, text: joined(free, launch) }
  const title = plan.QueuePosition === undefined ? PLAN.wait : PLAN.place(plan.QueuePosition)
  const behind = plan.QueuedBehind?.length ? PLAN.behind(plan.QueuedBehind) : ''
  return { tone: 'busy', title, text: joined(sentence(plan.WaitsFor ?? ''), free, behind, launch) }
}

function factsOf(plan: TrainingJobPlan): [string, string | undefined][] {
  const labels = PLAN.labels
  const optional = <T>(value: T | undefined, text: (value: T) => string) =>
    value === undefined ? undefined : text(value)
  const odds = (plan.RecoveryOdds ?? []).map(({ LostNodes, Probability }) => {
    const loss = PLAN.loss(LostNodes)
    return Probability >= 1 ? PLAN.always(loss) : PLAN.sometimes(loss, percent(Probability))
  })
  const slots = plural(plan.SlotsPerNode, 'slot')
  const memory = bytes(plan.NodeMemoryBytes ?? 0)
  return [
    [labels.fleet, plan.FleetName],
    [labels.ranks, PLAN.ranks(count(plan.WorldSize), plural(plan.NodeCount, 'node'), count(plan.RanksPerNode))],
    plan.ParityGroupSize === undefined
      ? [labels.copies, count(plan.Copies)]
      : [labels.parity, PLAN.groups(plan.ParityGroupSize)],
    [
      labels.memory,
      optional(plan.CopiesMemoryRatio, (copies) => PLAN.memory(plan.MemoryRatio.toFixed(2), copies.toFixed(2))),
    ],
    [labels.losses, odds.join('; ') || undefined],
    [labels.state, optional(plan.LargestShardBytes, (largest) => PLAN.state(bytes(largest), slots, memory))],
    [labels.price, optional(plan.CostUsdPerHour, (price) => PLAN.perHour(dollars(price)))],
    [labels.limit, optional(plan.MostCostUsd, dollars)],
    [labels.mttf, optional(plan.ExpectedMttfSeconds, duration)],
    [labels.mttr, optional(plan.ExpectedRecoverySeconds, duration)],
    [labels.ettr, optional(plan.ExpectedEttrRatio, percent)],
  ]
}
