/** Logged values as columns over steps. Pure. */
import type { MetricDataResult } from '../contract'

export interface Series {
  names: string[]
  steps: number[]
  /** null where nothing was logged, or what was is not finite. */
  values: Record<string, (number | null)[]>
}

/** A point of several steps is drawn at the last of them. */
export function series(results: MetricDataResult[]): Series {
  const names = results.map((result) => result.MetricName).sort()
  const means = new Map(results.map((result) => [result.MetricName, new Map((result.LastSteps ?? []).map((step, index) => [step, result.Means?.[index]]))]))
  const steps = [...new Set(results.flatMap((result) => result.LastSteps ?? []))].sort((a, b) => a - b)
  const values = Object.fromEntries(
    names.map((name) => [
      name,
      steps.map((step) => {
        const value = means.get(name)!.get(step)
        return typeof value === 'number' && Number.isFinite(value) ? value : null
      }),
    ]),
  )
  return { names, steps, values }
}

export const csv = ({ names, steps, values }: Series): string =>
  [['step', ...names].join(','), ...steps.map((step, index) => [step, ...names.map((name) => values[name]![index] ?? '')].join(','))].join('\n') + '\n'
