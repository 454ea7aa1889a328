/** Logged values as columns over steps. Pure. */
import type { Metric } from '../contract'

export interface Series {
  names: string[]
  steps: number[]
  /** null where nothing was logged, or what was is not finite. */
  values: Record<string, (number | null)[]>
}

/** A step that was done again counts as its newest generation logged it. */
export function series(metrics: Metric[]): Series {
  const newest = new Map<number, Metric>()
  for (const metric of metrics) {
    const held = newest.get(metric.Step)
    if (!held || metric.Generation >= held.Generation) newest.set(metric.Step, metric)
  }
  const rows = [...newest.values()].sort((a, b) => a.Step - b.Step)
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.Values ?? {})))].sort()
  const values = Object.fromEntries(
    names.map((name) => [
      name,
      rows.map((row) => {
        const value = row.Values?.[name]
        return typeof value === 'number' && Number.isFinite(value) ? value : null
      }),
    ]),
  )
  return { names, steps: rows.map((row) => row.Step), values }
}

export const csv = ({ names, steps, values }: Series): string =>
  [['step', ...names].join(','), ...steps.map((step, index) => [step, ...names.map((name) => values[name]![index] ?? '')].join(','))].join('\n') + '\n'
