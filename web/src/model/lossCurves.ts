/** Selects the loss curves that a list requests: those of rows in view that are missing or out of date. Pure. */
import type { LossCurve } from '../contract'
import { finite } from './metrics'

/** The loss curve of one job, with the time and the step of its request. `values`: null if a value is not finite. */
export interface HeldCurve {
  values: (number | null)[]
  /** The step of the job when its curve was requested. */
  step: number
  /** Unix seconds. */
  at: number
}
export type HeldCurves = Readonly<Record<string, HeldCurve>>

/** Maximum number of curves per request. The API sets this limit. */
export const MOST_CURVES = 50
const REFRESH_SECONDS = 30
const MOST_HELD = 1_000

/** Return the runs whose curve is missing, or is old and lacks steps that the job has made since its request. */
export function curvesToRequest(
  jobs: readonly { RunId: string; Boundary: number }[],
  held: HeldCurves,
  now: number,
): string[] {
  return jobs
    .filter(({ Boundary }) => Boundary > 0)
    .filter(({ RunId, Boundary }) => {
      const curve = held[RunId]
      return curve === undefined || (curve.step !== Boundary && now - curve.at >= REFRESH_SECONDS)
    })
    .map(({ RunId }) => RunId)
    .slice(0, MOST_CURVES)
}

/** Return the held curves with the answers for `requested`. A job without a loss has a curve without values. */
export function withCurves(
  held: HeldCurves,
  requested: ReadonlyMap<string, number>,
  answers: readonly LossCurve[],
  now: number,
): HeldCurves {
  const values = new Map(answers.map((curve) => [curve.RunId, curve.Values.map(finite)]))
  const fresh = [...requested].map(([run, step]) => [run, { values: values.get(run) ?? [], step, at: now }] as const)
  const others = Object.entries(held).filter(([run]) => !requested.has(run))
  return Object.fromEntries([...others, ...fresh].slice(-MOST_HELD))
}
